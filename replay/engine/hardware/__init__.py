"""Sizes of models and GPUs.

In reading order: `layers` has the matrix products of a layer, `specs` the known models and GPUs,
`find` looks one up. `hf_config`, `hf_fields`, `hf_weights` and `hf_formats` read a model's folder,
`architectures` lists the families that are counted, `gpu_sheet` reads a file about a GPU.
`kv_layout` and `memory` compute the memory that a model needs, `gpu_memory` the memory of a GPU.
The room imports no other room.
"""
