"""Start and stop real vLLM servers, one on each GPU.

In reading order: `cli` has the commands and `options` their options. `plan` finds the facts that
the servers depend on, from the GPUs and models in `gpu`, and `commands` writes their command lines.
`servers` starts them, asks for their health and stops them. `state` is the fleet's folder. `units`
writes systemd units or a Compose file instead, and `proxy_file` the proxy's configuration.
"""
