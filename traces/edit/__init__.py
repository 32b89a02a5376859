"""Change, describe and export a trace that already exists.

In reading order: `edit` has the verbs, from cut to anonymise, `sharing` computes the hits of an
ideal prefix cache, `describe` sums up a trace, `export` writes the formats of other tools. The room
imports `formats` and below.
"""
