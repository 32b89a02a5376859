"""The proxy between clients and vLLM servers.

A request goes through serve (the ports), app (its steps), driver (decisions meet the clock), core
(the decisions), and relay (the response). In reading order, the modules: __main__ and cli (the
`forebay` command), completion (for shells), proxy_cli (`forebay proxy`), serve, services (the
long-lived objects), build (makes them), reload (a new configuration while the proxy runs), app,
driver, routing (the types of a routing policy), log_events (the names of log lines).

The rooms, from the top: workers (several processes), admin (the admin port), operate (commands that
change a running proxy), diagnose (commands that ask it), relay, security (keys and certificates),
kv_events (the caches of engines), telemetry (metrics and logs), api (the bodies of clients),
backends (the servers), identity (tokens that name tenants), runtime (the process), share (several
proxies), config, http1 (connections), core. Each may import the rooms below it, and
`traces/ground`. The room vllm_scheduler stands apart: vLLM loads it, and it imports core alone.
"""
