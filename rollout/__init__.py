"""The engine side: collectors that turn what a rollout engine returns into shards."""
