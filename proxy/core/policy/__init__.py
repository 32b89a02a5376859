"""The policy: one question a file. Start here.

 1. admission.py: is a request accepted or rejected, and when should its client come back?
    Here are the quota (`early_reject`) and Retry-After (`ReturnTimes.book`).
    Constants: SURE, RETURN_SHARE, RETRY_MOST_S; in learn/cost.py FAR_OFF.
    Worth: 41 points at 1.5 to 3 times load; of clients that come back at 3 times load, 97 instead
    of 68 % served.
 2. routing.py: which backend?
    Constants: NO_WAIT_S, DISTURBS; in model.py SLACK, in learn/cost.py UNPROVEN.
    Worth: cached prefixes 1.6 points at 1.5 times load; copies for one request that count twice,
    0.6 to 1.1 points of agent sessions at twice the load; decoding, 17 % of the median E2E of one
    handbook for all; prefills that disturb, and copies weighed by their work, 16 % of
    multi-turn goodput at 1.5 times load on eight engines.
 3. start.py: may a waiting request start now?
    Constants: DISPATCH_AHEAD_S, BESIDE_OTHERS; in model.py FULL.
    Worth: order and cancellation stay with the proxy; the KV check 0.4 points, 2.4 in overload;
    answers that count half in it, 0.9 points of agent sessions at twice the load;
    a light tenant's p99 2.4 instead of 3.9 times that alone; hits that share a step, a sixth of the
    worst TTFT of 200 users; prefills that share its fixed cost, half of the median TTFT of Azure
    conversation at 1.3 times load.
 4. order.py: which waiting request is next, in the proxy and in the engine?
    Constants: STRETCH; in state/ BUCKETS_SHARE and CLASS_SHARE (bucket_queue.py), LATELY_S
    (tenants.py).
    Worth: shortest first 1.3 points; shares 4, 8, 19 points of documents at 1.5, 2, 3 times load.
 5. long_prefills.py: what protects short prompts from long prefills?
    Constants: HISTORY, MAJORITY of model.py.
    Worth: 2.2 points; several kept clear, 3 to 12 % of goodput and half of the median E2E of
    unshared documents at 1.5 and 2 times load on eight engines; with the flag, up to 40 %.
 6. coalesce.py: which requests wait for another request's prefill? (leaders and followers)
    Constants: AWAITED.
    Worth: following, 26 % of p99 with chunked prefill; joining a waiting leader, 5 to 9 % of
    documents' p99; followers sent while their leader is computed, a fifth of the worst TTFT of 50
    users of 100,000 tokens.
 7. forecast.py: how long would a request wait on each backend?
    Constants: SURE of admission.py; in model.py MAJORITY.
    Worth: KV wait, 0.4 instead of 4 % rejected after queueing; margins, 18 % of documents' p99 in
    overload; waiting hits that need no KV cache, a third of the load of popular
    documents with vLLM's flag.
    kv_wait.py has the wait for KV cache, and copies of prefixes.
    Constants: ENOUGH, FULL, MAJORITY of model.py.
    Worth: three in four rejections of llm-d's b2b-saas come at once at 1.5 times load, instead of
    none; without copies, 5 points more of it are in time at .95 times load.
 8. precedence.py: which work goes before a request?
    Constants: FULL_STEP_TOKENS in learn/cost.py; FULL, SLACK in model.py.
    Worth: arrivals that overtake 0.5 points; work alongside chunks 1.3 points.
 9. rendezvous.py: where do several proxies send a cold prompt?
    Constants: AGREED_SHARE; in model.py MAJORITY, ENOUGH, HISTORY.
    Worth: 2 to 6 points of cache hits of eight proxies that report computed prompts.
10. engine_step.py: how many tokens of which prefills does an engine compute next? For the scheduler
    inside vLLM and the simulated engine, not for the proxy. engine_queue.py has their order.
    Constants: DECODES_SHARE, STRETCH; in learn/decay.py RECENT_S; in model.py MAJORITY.

"Worth" is the loss without it, in points of requests in time unless it says otherwise: virtual
time, 2026-11-23, 25 workloads, 2 to 5 seeds for each part alone (docs/research/parts.md).
Constants with one meaning in several files are in `model.py`; each says what happens when doubled.

The policy reads facts in `state/` and estimates in `learn/`. `shaper.py` has the events: rejections
after admission (`wake`, `retry`), lessons from an answer (`used`). `arrival.py` has the way
of a new request, `steps.py` the steps that all events share: work stealing (`_better_here`),
requests pulled to a computed prefix (`_gather`). `explain/` observes and decides nothing.
`observe.py` plays all this for traffic that is sent at once.
"""
