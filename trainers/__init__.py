"""The trainer side: overrides that make a training forward use the recorded experts."""
