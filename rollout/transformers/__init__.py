"""transformers' continuous batching as a rollout engine that returns routes.

    with TransformersEngine("path/to/model", dtype="bfloat16") as engine:
        collect_sync(prompts, store, engine.info, sampling=engine.sampling, sampler=engine)

transformers has a real engine inside (paged attention cache, scheduler, chunked prefill, prefix sharing, preemption) that knows
nothing of routes. Here it runs with capture on, in this process (`engine`) or behind an OpenAI-compatible endpoint (`server`,
`r3 serve MODEL --engine transformers`) to which `r3 collect` speaks as to vLLM.

    surface    what of transformers is built on: one version, its signatures checked
    params     how one request is to be sampled
    text       prompts to token ids and back
    requests   one request: its tokens, log-probs and route rows
    sampling   raw log-probs, and the draw of the next tokens, a generator for each request
    hooks      subclasses of transformers' manager, processor, cache, scheduler: where rows meet requests and slots
    keeping    rows from the routers to requests and slots
    loading    the model, and what is refused
    loop       the engine's thread, commands to it and results from it
    engine     the engine itself
    api        bodies of the endpoint, from and to vLLM's format
    server     the endpoint
"""
