"""Start and watch real vLLM servers, one on each GPU.

In reading order: `cli` has the commands and `options` their options. `plan` decides the servers,
from the GPUs and models in `gpu`. `run` carries the plan out with `supervisor`, `server_process`,
`probe` and `restarts`. `state` is the fleet's folder, from which `control` and `show` answer
`status` and `down`. `proxy_file` writes the proxy's configuration.
"""
