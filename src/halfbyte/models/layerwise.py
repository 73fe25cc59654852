"""Layer-by-layer calibration for models that do not fit into memory.

The model is built on the meta device and runs one forward pass. The embeddings and each decoder
layer load their weights from the shards when called, and free them on return; masks and rotary
embeddings are transformers' own. The output embeddings are never loaded. Memory holds one layer and
the hidden states of the tokens.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.checkpoints.dialects.registry import read_declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.index import CheckpointIndex
from halfbyte.kvcache import KVScales
from halfbyte.models.amax import AmaxRecorder
from halfbyte.models.architectures import check_supported
from halfbyte.models.attention_functions import GENERATE, register
from halfbyte.models.config_fields import check_sizes
from halfbyte.models.file_names import named_as_modules
from halfbyte.models.key_statistics import KVRecorder
from halfbyte.models.kv_calibration import (
    calibrate,
    calibration_tokens,
    check_vocabulary,
    kv_scales_of,
    read_calibration_text,
    usual_first_tokens,
    warn_of_few_tokens,
)
from halfbyte.models.loader import device_or_default, load_model
from halfbyte.models.local_files import ModelLoadError, local_folder, read_model_config
from halfbyte.models.meta_model import empty_model, make_buffers, resolve_dtype
from halfbyte.models.nvfp4.layer_plan import LayerPlan, plan_layers
from halfbyte.models.nvfp4.layer_sink import Sink
from halfbyte.models.nvfp4.layers import LayerOptions, replace_layers
from halfbyte.models.nvfp4.mxfp4_experts import (
    check_surplus_of_experts,
    holds_mxfp4_experts,
    put_mxfp4_experts_in_place,
)
from halfbyte.models.nvfp4.weight_stream import weight_sinks
from halfbyte.models.tokenizer import has_tokenizer, load_tokenizer

logger = logging.getLogger("halfbyte")

OnLayer = Callable[[int, int], Any]
"""Called with the number of finished layers and the total."""
RunLayer = Callable[[nn.Module, Callable[[], torch.Tensor]], torch.Tensor]
"""Called with a loaded decoder layer and a function that runs it on all rows; returns the
layer's output."""


def calibrate_checkpoint(
    path: str | Path,
    *,
    text_file: str | Path | None = None,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
    dtype: str | torch.dtype = "auto",
    on_layer: OnLayer = lambda done, total: None,
) -> KVScales:
    """Measure the KV scales of a checkpoint, even if it has some.

    The result equals `calibrate` with the whole model, on the CPU bit for bit. A checkpoint that
    cannot be streamed layer by layer is loaded whole, with a log message. A text of
    few tokens logs a warning, see `warn_of_few_tokens`.

    Args:
        path: folder or hub id.
        text_file: of UTF-8 text; by default the built-in text.
        max_tokens: of the text, see `calibration_tokens`.
        device: by default a GPU if there is one.
        dtype: of weights and computation, `auto` for the checkpoint's.
        on_layer: see `OnLayer`.

    Raises:
        ModelLoadError, CheckpointError, UnsupportedModelError: as `load_model`.
        ValueError: a text that cannot be read, is not UTF-8, or is empty; `max_tokens` below 1; an
            unknown device or dtype; K or V that is not finite, or zero in every layer.
    """
    device = device_or_default(device)
    text = read_calibration_text(text_file, "text")
    name = "the built-in text" if text_file is None else Path(text_file).name
    folder = local_folder(path)
    config = read_model_config(folder)
    check_supported(config)
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    if tokenizer is None and text_file is not None:
        raise ModelLoadError(f"{folder}: has no tokenizer, which a text needs")
    ids, source = calibration_tokens(tokenizer, config, text, name, max_tokens)
    warn_of_few_tokens(ids.numel(), config)
    first_tokens = usual_first_tokens(tokenizer)
    check_vocabulary(config, ids, first_tokens)
    try:
        streamed = StreamedModel(folder, config, device, dtype)
    except CheckpointError as error:
        model = load_model(folder, dtype=dtype, device=device)
        logger.warning("calibrated with the whole model in memory: %s", error)
        return calibrate(model, ids, source, first_tokens=first_tokens)
    recorder = KVRecorder(streamed.model, first_tokens, ids.shape[0])
    # Rows are equally long; only position 0 of the last rows (first tokens) counts.
    firsts = ids[:1].repeat(len(first_tokens), 1)
    firsts[:, 0] = torch.tensor(first_tokens, dtype=ids.dtype, device="cpu")
    streamed.run(torch.cat([ids, firsts]), recorder, on_layer)
    return kv_scales_of(recorder, config, source)


class StreamedModel:
    """A model for one forward pass without its output embeddings.

    Args:
        folder: of an unquantized checkpoint, of one with NVFP4 layers, or of GPT-OSS's own files.
        config: of `read_model_config`.
        device: for weights and computation.
        dtype: `auto` for the checkpoint's.

    Raises:
        CheckpointError: another kind of checkpoint, or tensors that do not fit the model; headers
            are compared before any weight is read.
    """

    def __init__(
        self, folder: Path, config: Any, device: torch.device, dtype: str | torch.dtype
    ) -> None:
        section = getattr(config, "quantization_config", None)
        declaration = read_declaration(folder, {"quantization_config": section})
        mxfp4 = holds_mxfp4_experts(config)
        if declaration is None and section is not None and not mxfp4:
            method = section.get("quant_method") if isinstance(section, dict) else None
            raise CheckpointError(
                f"{folder}: expected unquantized or NVFP4 weights, which are read layer by layer, "
                f"found quant_method {method!r}; use the unquantized checkpoint"
            )
        self._index = named_as_modules(CheckpointIndex.read(folder), config.model_type)
        check_sizes(config, self._index)
        self._device = device
        resolved = resolve_dtype(dtype, config, self._index)
        model = empty_model(folder, config, resolved)
        plan = LayerPlan()
        if declaration is not None and declaration.quantizes_weights:
            plan = plan_layers(model, declaration, self._index)
            replace_layers(model, plan, declaration, LayerOptions(resolved, device))
        if mxfp4:
            put_mxfp4_experts_in_place(model, LayerOptions(resolved, device))
        sinks, absent = weight_sinks(model, plan, declaration, self._index, resolved)
        check_surplus_of_experts(model, self._index)
        base: Any = model.base_model
        prefix = f"{model.base_model_prefix}."
        elsewhere = sorted(name for name in absent if name.startswith(prefix))
        if elsewhere:
            raise CheckpointError(f"{folder}: {elsewhere[0]}: expected in the files, found none")
        make_buffers(model, device)
        self.model = model
        register()
        model.set_attn_implementation(GENERATE)
        self._base: nn.Module = base.eval()
        self._on_layer: OnLayer = lambda done, total: None
        self._run_layer: RunLayer = lambda layer, run: run()
        # Group tensors by part; the output embeddings have another prefix.
        part_of = re.compile(re.escape(prefix) + r"(?:(layers\.\d+|embed_tokens)\.)?")
        self._sinks: dict[str, dict[str, Sink]] = defaultdict(dict)
        for name, sink in sinks.items():
            match = part_of.match(name)
            if match:
                self._sinks[match[1] or ""][name] = sink
        layers = list(base.layers)
        self._stream("embed_tokens", base.embed_tokens)
        for i, layer in enumerate(layers):
            done = partial(self._layer_done, i + 1, len(layers))
            self._stream(f"layers.{i}", layer, done, is_layer=True)

    @torch.inference_mode()
    def run(
        self,
        input_ids: torch.Tensor,
        recorder: AmaxRecorder,
        on_layer: OnLayer = lambda done, total: None,
        run_layer: RunLayer = lambda layer, run: run(),
    ) -> None:
        """Run one forward pass. Call once: the weights are freed afterwards.

        Args:
            input_ids: int64 `[rows, tokens]`.
            recorder: gets every layer's K and V, row by row.
            on_layer: see `OnLayer`.
            run_layer: see `RunLayer`.

        Raises:
            CheckpointError: a file cannot be read any more, or has an invalid scale.
        """
        self._on_layer, self._run_layer = on_layer, run_layer
        self._load("")
        ids = input_ids.to(self._device)
        self._base(input_ids=ids, past_key_values=recorder, use_cache=True)

    def _stream(
        self,
        part: str,
        module: nn.Module,
        done: Callable[[], Any] = lambda: None,
        *,
        is_layer: bool = False,
    ) -> None:
        """Make a module load its weights when called, run row by row, and free them."""
        run = module.forward

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._load(part)

            def run_rows() -> torch.Tensor:
                return torch.cat([run(row, *args, **kwargs) for row in x.split(1)])

            result = self._run_layer(module, run_rows) if is_layer else run_rows()
            for tensors in (module._modules, module._parameters, module._buffers):
                tensors.clear()
            done()
            return result

        module.forward = forward

    def _layer_done(self, done: int, total: int) -> None:
        self._on_layer(done, total)

    def _load(self, part: str) -> None:
        sinks = self._sinks.pop(part, {})  # pop: the sinks hold references to modules
        for name, tensor in self._index.stream(sinks, self._device):
            sinks[name](tensor)
