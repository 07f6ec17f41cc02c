"""veRL's trainer side: its own FSDP and Megatron engines with routing replay in the actor's passes. See docs/verl.md.

    plugin    loaded by veRL, registers the engines when veRL's own are there; imports nothing heavy
    engines   the FSDP engine;  megatron  the Megatron engine
    samples   the samples of a micro-batch, from shards or from the batch
    stats     counters and gaps of a mini-batch, for veRL's metrics
    cpu       veRL's platform for a machine without an accelerator

Importing this package imports none of them.
"""
