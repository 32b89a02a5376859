"""The studies, one module each: `forebay.analysis.experiments.STUDIES` lists them.

- One server: `prefill` and `decode` fit step times, `phases` puts both on a roofline, `hol` shows
  head-of-line blocking, `saturation` finds the knee, `kv_study` fills the KV cache, `memory` counts
  the bytes that pages save, `needle` scores answers by depth and length.
- A fleet: `hol_fleet` is the part of `hol` that has a proxy, `shared_document` has many users of
  one document, `flood` has more load than capacity.

They import `forebay.analysis.experiments`, `charts`, `kv` and `statistics`, never each other,
except for `hol_fleet`.
"""
