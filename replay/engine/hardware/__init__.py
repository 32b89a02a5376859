"""Sizes of models and GPUs.

In reading order: `layers` has the matrix products of a layer, `specs` the known models and GPUs,
`find` looks one up. `hf_config`, `hf_fields`, `hf_weights` and `hf_formats` read a model's folder,
`architectures` says which families are counted, `gpu_sheet` reads a file about a GPU. `kv_layout`
and `memory` compute what a model needs, `gpu_memory` what a GPU has. The room imports no other
room.
"""
