"""Start and watch real vLLM servers, one on each GPU.

`plan` decides the servers from `profiles`, `sizes`, `gpus` and `flags`; `run` carries the plan out
with `supervisor` and `server_process`; `state` is the fleet's folder, from which `control` and
`show` answer `status` and `down`. `cli` has the commands.
"""
