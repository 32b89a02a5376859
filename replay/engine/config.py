"""The checked options of one simulated engine, named and set by default as in `vllm serve`."""

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.flags import EngineFlags, flag_of
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.memory import (
    MemoryBudget,
    MemoryOptions,
    adapters_of,
    engine_budget,
)
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.limits import POLICIES, SchedulerLimits, check_together, read_pause
from forebay.replay.engine.placement import (
    check_block_size,
    check_groups,
    check_links,
    check_precision,
    check_room,
    check_step,
    host_limits,
    rank_of,
    served_model,
    unmeasured,
)
from forebay.replay.engine.timing.api_server import ApiServer
from forebay.replay.engine.timing.served import checked_by_runs, known_error
from forebay.replay.engine.timing.speculation import (
    Speculation,
    draft_of,
    read_speculation,
)
from forebay.replay.engine.timing.step_constants import (
    Calibration,
    CalibrationFile,
    calibration_for,
    measured_elsewhere,
)
from forebay.replay.engine.timing.step_time import StepTimeModel, step_time_model
from forebay.replay.engine.vllm_versions import SINCE, VllmRelease, find_release
from forebay.traces.ground.command_line.options import same_named
from forebay.traces.ground.errors import InputError


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineFlags):
    """Options of an engine. A value that cannot work raises InputError here.

    Attributes:
        model, gpu: a name, a JSON file (see `find_model`, `find_gpu`) or the sizes themselves.
        calibration: step-time constants or their file. Default: the shipped file of model and GPU.
    """

    model: str | ModelSpec = "llama-3-8b"
    gpu: str | GpuSpec = "h200"
    _: KW_ONLY
    calibration: Path | Calibration | None = None
    time_scale: Annotated[float, typer.Option(help="Simulated seconds in a wall second.")] = 1.0
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use; default: --model as given.")
    ] = None
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Answer 503 beyond this many unfinished requests.")
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Answer 503 beyond this many prompt tokens without a first token."),
    ] = None
    enable_request_id_headers: Annotated[
        bool, typer.Option("--enable-request-id-headers", help="Echo X-Request-Id.")
    ] = False
    seed: Annotated[
        int | None, typer.Option(help="Random seed of ids, output lengths and words.")
    ] = None

    def __post_init__(self) -> None:
        EngineFlags.__post_init__(self)
        # Check names first, then the limits of the GPU and of this version of vLLM.
        gpu = self.gpu_spec  # report an unknown name first
        _ = self.rank_spec
        check_precision(self.model_spec, gpu, self.kv_cache_dtype)
        check_links(gpu, self.tensor_parallel_size)
        _ = self.draft_rank
        if self.speculation is not None:
            self.speculation.check(self.async_scheduling, self.batched_tokens)
        defaults = {field.name: field.default for field in fields(self)}
        self.release.check_options(n for n in SINCE if getattr(self, n) != defaults[n])
        # Then the range of each number.
        _check_positive(self.time_scale, "--time-scale", "simulated seconds in a wall second")
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_num_active_seqs",
            "prefill_schedule_interval",
            "num_gpu_blocks_override",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "api_server_count",
            "renderer_num_workers",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{flag_of(name)} {value}: give a whole number of 1 or more")
        if self.long_prefill_token_threshold < 0:
            raise InputError(
                f"--long-prefill-token-threshold {self.long_prefill_token_threshold}: "
                "give tokens, or 0 for no cap"
            )
        check_block_size(self.block_size)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: give a share in (0, 1]"
            )
        if not 0 <= self.watermark < 1:
            raise InputError(f"--watermark {self.watermark}: give a share of the blocks in [0, 1)")
        # Last the options that must fit each other, and the KV cache.
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.seqs:
            raise InputError(
                f"--max-num-active-seqs {self.max_num_active_seqs} is more than --max-num-seqs "
                f"{self.seqs}: lower the first or raise the second"
            )
        if self.scheduling_policy not in POLICIES:
            raise InputError(
                f"--scheduling-policy {self.scheduling_policy}: give {' or '.join(POLICIES)}"
            )
        check_together(self.limits())
        check_groups(self.kv_budget.layout, self.release, self._draft())
        self._check_lengths()
        self.step_constants()

    def step_constants(self) -> Calibration:
        """Return the constants of the step-time model (InputError: a bad file)."""
        return self.calibration_file().constants

    def timing(self) -> StepTimeModel:
        """Return the step-time model, which engines of equal options share."""
        return step_time_model(
            self.rank_spec,
            self.gpu_spec,
            self.step_constants(),
            self.asynchronous,
            self.draft_rank,
            self.speculation.tokens if self.speculation else 0,
        )

    def constants_remark(self) -> str | None:
        """Return a remark on parts not measured on this GPU, None if all parts were measured."""
        parts = unmeasured(self.rank_spec, self.gpu_spec)
        if self.speculation is not None:
            parts.append("speculative decoding, with the acceptance that was given")
        remarks = [None if self.calibration else checked_by_runs(self.rank_spec, self.gpu_spec)]
        remarks.append(measured_elsewhere(self.calibration_file(), self.gpu_spec.name))
        if self.enable_lora:
            remarks.append("of adapters only the memory is simulated, no wait for --max-loras")
        if self.model_spec.language_only:
            remarks.append("a tower for images or sounds needs memory, which is not counted")
        if parts:
            remarks.append(f"never measured here: {'; '.join(parts)}")
        return "; ".join(remark for remark in remarks if remark) or None

    def known_error(self) -> str | None:
        """Return the error of step times against served runs. None: small, or --calibration."""
        return None if self.calibration else known_error(self.rank_spec, self.gpu_spec)

    def how_checked(self) -> str:
        """Return the extent to which the step times of this model on this GPU were checked."""
        file = self.calibration_file()
        runs = None if self.calibration else checked_by_runs(self.rank_spec, self.gpu_spec)
        return runs or file.checked

    def calibration_file(self) -> CalibrationFile:
        """Return the constants with their provenance (InputError: a bad file)."""
        return calibration_for(self.calibration, self.model_spec.name, self.gpu_spec.name)

    def api_server(self, constants: Calibration | None = None) -> ApiServer:
        """Return the API server in front of the engine, without any request.

        Args:
            constants: used instead of the constants of the configuration.
        """
        times = (constants or self.step_constants()).server_times()
        return ApiServer(times, self.api_server_count, self.renderer_num_workers)

    @property
    def asynchronous(self) -> bool:
        """Return True if a step is planned while the step before is running."""
        if self.async_scheduling is None:
            blocked = self.speculation is not None and self.speculation.on_cpu
            return self.release.schedules_ahead and not blocked
        return self.async_scheduling

    @property
    def model_spec(self) -> ModelSpec:
        """Return the whole model, with the precision of weights and KV cache that is served."""
        model = self.model
        if isinstance(model, str):
            model = find_model(model, stretches_yarn=self.release.stretches_yarn)
        return served_model(model, self.quantization, self.kv_cache_dtype)

    @property
    def rank_spec(self) -> ModelSpec:
        """Return the part of the model that one GPU computes."""
        return rank_of(self.model_spec, self.tensor_parallel_size)

    @property
    def speculation(self) -> Speculation | None:
        """Return the checked options of speculative decoding, or None."""
        return read_speculation(self.speculative_config, self.acceptance)

    @property
    def draft_rank(self) -> ModelSpec | None:
        """Return the share of the draft model on each GPU, or None without a draft model."""
        draft = self._draft()
        return None if draft is None else rank_of(draft, self.tensor_parallel_size)

    def _draft(self) -> ModelSpec | None:
        speculation = self.speculation
        if speculation is None:
            return None
        model = None
        if speculation.model is not None:
            model = served_model(find_model(speculation.model), None, self.kv_cache_dtype)
        return draft_of(self.model_spec, speculation, model)

    @property
    def gpu_spec(self) -> GpuSpec:
        return find_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def served_name(self) -> str:
        """Return the name for clients: --served-model-name, or the model as given, like vLLM."""
        return self.served_model_name or self.model_name

    @property
    def model_name(self) -> str:
        """Return the model as given."""
        return self.model if isinstance(self.model, str) else self.model.name

    @property
    def context(self) -> int:
        if self.max_model_len:
            return self.max_model_len
        model = self.model_spec
        return model.default_len or model.max_model_len

    @property
    def release(self) -> VllmRelease:
        """Return the rules of the vLLM version that is simulated."""
        return find_release(self.vllm_version)

    @property
    def batched_tokens(self) -> int:
        """Return max_num_batched_tokens: as given, or the default for the GPU.

        The default is at least the context without chunked prefill, and at most max_num_seqs times
        the context, as in EngineArgs of vLLM 0.33.
        """
        if self.max_num_batched_tokens:
            return self.max_num_batched_tokens
        tokens, seqs = self._batch_defaults()
        if not self.enable_chunked_prefill:
            tokens = max(tokens, self.context)
        return min(tokens, (self.max_num_seqs or seqs) * self.context)

    @property
    def seqs(self) -> int:
        """Return max_num_seqs: as given, or the default for the GPU."""
        if self.max_num_seqs:
            return self.max_num_seqs
        return min(self._batch_defaults()[1], self.batched_tokens)

    def _batch_defaults(self) -> tuple[int, int]:
        return self.release.batch_defaults(self.gpu_spec.memory_gib, self.gpu_spec.name)

    def limits(self) -> SchedulerLimits:
        speculation, layout = self.speculation, self.kv_budget.layout
        heads = speculation is not None and speculation.drops_block
        # Options and rules of the version with the same names. The others depend on more.
        values = same_named(self, SchedulerLimits) | same_named(self.release, SchedulerLimits)
        values |= {
            "max_model_len": self.context,
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.seqs,
            "sliding_window": self.model_spec.attended_window,
            "groups": layout.groups,
            "block_size": layout.block_size,
            "tokens_in_flight": 0 if layout.one_kind else layout.tokens_in_flight,
            "proposed_tokens": speculation.tokens if speculation else 0,
            "lookahead_tokens": speculation.lookahead if speculation else 0,
            "draft_slots": speculation.slots if speculation else 0,
            "drops_hit_block": heads and self.release.drops_hit_block,
            "hash_lookahead": int(heads and not self.release.drops_hit_block),
            "pause_s": read_pause(self.scheduler_cls, self.additional_config),
        }
        # Options of the host's memory, and defaults by version.
        if self.kv_offloading_size is not None:
            ranks = 1 if self.model_spec.latent else self.tensor_parallel_size
            values |= host_limits(self.kv_offloading_size, self.gpu_spec, ranks, layout)
        if self.scheduler_reserve_full_isl is None:
            values["scheduler_reserve_full_isl"] = self.release.reserves_full_isl
        if not self.release.paces_prefills:
            values["prefill_schedule_interval"] = 1
        return SchedulerLimits(**values)

    @property
    def kv_budget(self) -> MemoryBudget:
        """Return the memory of a GPU, its KV blocks (the null block included), and their layout.

        Raises InputError for bad adapters.
        """
        ahead = self.asynchronous and self.release.keeps_steps_in_flight
        budget = engine_budget(
            self.model_spec,
            self.gpu_spec,
            MemoryOptions(
                block_size=self.block_size,
                value_bytes=self.model_spec.kv_value_bytes,
                tensor_parallel=self.tensor_parallel_size,
                max_num_batched_tokens=self.batched_tokens,
                steps_in_flight=1 + ahead,
                gpu_memory_utilization=self.gpu_memory_utilization,
                max_num_seqs=self.seqs,
                adapters=adapters_of(self.enable_lora, self.max_loras, self.max_lora_rank),
                caches_prefixes=self.enable_prefix_caching,
                whole=self.disable_hybrid_kv_cache_manager,
            ),
            draft=self._draft(),
        )
        return replace(budget, blocks=self.num_gpu_blocks_override or budget.blocks)

    def _check_lengths(self) -> None:
        # The context must not exceed the length that the model was trained for.
        longest = self.model_spec.max_model_len
        if self.context > longest:
            raise InputError(
                f"--max-model-len {self.context}: {self.model_spec.name} has a context of "
                f"{longest} tokens"
            )
        if self.context < 2:
            raise InputError(f"--max-model-len {self.context}: leave room for prompt and output")
        whole = 0 if self.enable_chunked_prefill else self.context
        check_step(self.batched_tokens, self.seqs, whole)
        check_room(self.kv_budget, self.context)


def _check_positive(value: float, flag: str, what: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{flag} {value}: give {what}, more than 0")
