"""Facts: running requests, waiting requests, and reservations.

In reading order: in_flight (a request that was sent), prefill_queue (prefills of one engine),
prefill_observer (how long they took), queue (requests that wait), bucket_queue (one bucket of
them, and the shares of all), kv_budget (the KV cache of one backend), backend (all of it together),
tenants (weights and quotas), elsewhere (work of other proxies), fleet (all backends).

May import learn, ordered and model.
"""
