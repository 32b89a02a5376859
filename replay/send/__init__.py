"""Send the requests of a plan.

In reading order: `dispatch` sends requests when they are due, `pacer` waits for that time,
`bodies` renders requests, `session_loop` sends turns after the answers that they wait for, `drain`
runs all of it on a fast event loop and ends it. `http` is the client. The room imports `plan` and
`clock`.
"""
