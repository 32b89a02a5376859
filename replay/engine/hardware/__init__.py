"""Sizes of models and GPUs.

In reading order: `specs` has the known ones, `find` looks one up. `hf_config`, `hf_fields`,
`hf_model` and `hf_weights` read a model's folder, `gpu_sheet` a file about a GPU. `kv_layout` and
`memory` compute what a model needs, `gpu_memory` what a GPU has. The room imports no other room.
"""
