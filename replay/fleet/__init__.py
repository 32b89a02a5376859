"""Start and watch real vLLM servers, one on each GPU.

In reading order: `cli` has the commands and `options` their options. `plan` decides the servers,
from the GPUs and models in `gpu`, and `show` prints the plan. `launch` carries it out with
`server_process`; `units` writes systemd units or a Compose file instead. `state` is the fleet's
folder, from which `control` answers `status` and `down`. `proxy_file` writes the proxy's
configuration.
"""
