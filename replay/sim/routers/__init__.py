"""Models of other routers, to compare the policy with.

In reading order: `base` is what they share, `models` and `token_routers` choose as named routers
do, `all_knowing` knows the engines' state, `possible` is a bound for all. The room imports
`forebay.replay.sim.engine`.
"""
