"""The proxy between clients and vLLM servers.

A request goes through serve (the ports), app (its steps), driver (decisions meet the clock), core
(the decisions), and relay (the response). In reading order, the modules: __main__ and cli (the
`forebay` command), command (runs a command), completion (for shells), proxy_cli (`forebay proxy`),
serve, services (the long-lived objects), build (makes them), reload (a new configuration while the
proxy runs), app, driver, routing (the types of a routing policy).

The rooms, from the top: admin (the admin port), share (several proxies), operate (commands that
change a running proxy), diagnose (commands that ask it), relay, kv_events (the caches of
engines), identity (tokens that name tenants), security (keys and certificates), api (the bodies
of clients), backends (the servers), http1 (connections), telemetry (metrics and logs), runtime (the
process), core, config. Each may import the rooms below it, and the package `traces`. The room
vllm_scheduler stands apart: vLLM loads it, and it imports core alone.
"""
