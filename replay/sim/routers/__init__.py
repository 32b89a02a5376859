"""Models of other routers, to compare the policy with.

In reading order: `base` is their common part, `models` and `token_routers` choose as named routers
do, `all_knowing` knows the engines' state, `possible` is a bound for all. The room imports
`forebay.replay.sim.engine`.
"""
