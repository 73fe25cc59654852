"""The names and parameters that other programs use; a change of them belongs into CHANGELOG.md."""

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

NAMES = {
    "attention": """
        ATTENTION_BACKENDS AttentionBackend AttentionConfig AttentionInputs AttentionPlans attend
        check_attention_backend paged_attention""",
    "checkpoints": """
        DIALECTS TENSOR_NAMES CheckpointError CheckpointIndex Declaration Dialect TensorEntry
        TensorNames fingerprint read_declaration read_kv_scales""",
    "engine": """
        LLM CompletionOutput EngineCore FinishReason Logprob ModelRunner NewToken Request
        RequestOutput SamplingParams Scheduler""",
    "kvcache": """
        KV_CACHE_QUANT_REGISTRY KV_SCALES_FILE NULL_PAGE STORE_BACKENDS ChunkedLocalAttentionSpec
        FullAttentionSpec HostSequence KVCacheDType KVCacheGroup KVCachePlan KVCacheQuantMethod
        KVCacheSpec KVRecipe KVScales NewTokens OutOfPagesError PageAllocator PageLayout PagedKVPool
        SequenceTables SlidingWindowSpec dequant_nvfp4_kv_cache get_kv_cache_quant_method
        nvfp4_kv_cache_full_dim nvfp4_kv_cache_split_views plan_kv_cache read_tokens
        reshape_and_cache""",
    "layouts": """
        KVCacheDType PageLayout PageViews Region page_stride swizzle_128x4 unswizzle_128x4
        v_scale_position""",
    "linear": """
        LINEAR_BACKENDS NvFp4Linear NvFp4LinearKernel NvFp4LinearLayerConfig
        init_nvfp4_linear_kernel select_nvfp4_linear_kernel""",
    "models": """
        BATCH_ARGUMENT ENGINE GENERATE SUPPORTED_MODEL_TYPES Cache KVQuantization LayerDTypes
        ModelLoadError PagedBatch UnsupportedModelError calibrate check_layer_dtypes
        check_supported find_kv_scales layer_specs load_model load_tokenizer register
        resolve_kv_scales""",
    "moe": """
        GPT_OSS MOE_BACKENDS SWIGLU ExpertMatrices ExpertsLayer GatedActivation MoeConfig MoeKernel
        MxFp4Experts NvFp4Experts PackedExperts Routing init_moe_kernel moe_experts route
        route_reference select_moe_kernel""",
    "numerics": "block_fp4 e2m1 e4m3 e5m2 e8m0 fp8 nvfp4 weighted_rounding",
    "quantization": "QuantizationReport quantize_checkpoint",
}
"""`__all__` of each package."""

MEMBERS = {
    "kvcache.KVCacheQuantMethod": """
        FORMATS SCALE_BLOCK_SIZE compute_cell_size create_buffers dequantize dequantize_prev_kv
        global_scale_from_amax load_scales_from_model name needs_dequant_workspace
        needs_global_scale quantize quantize_and_store""",
    "kvcache.PagedKVPool": """
        copy_pages device from_shards grow layer_pages layout num_bytes num_pages read_pages shard
        to write_pages""",
    "layouts.KVCacheDType": """
        check_head_size check_scale check_scale_on_host data_bytes from_checkpoint has_global_scale
        is_nvfp4 is_quantized kv_format layers_from_checkpoint parse resolve scale_block_size
        scale_bytes storage_dtype where""",
    "linear.NvFp4LinearKernel": """
        apply_weights can_implement is_supported process_weights_after_loading restore_weights""",
    "engine.LLM": "chat generate stream",
}
"""Public methods and attributes of classes, without members of enums."""

FORMATS = """
    AUTO BFLOAT16 FLOAT16 FLOAT32 FP4_BLOCK16 FP8_E4M3 FP8_E5M2 MXFP4 NVFP4 NVFP4_4OVER6"""

PARAMETERS = {
    "attention.attend": """
        query key value * query_positions key_positions scale sliding_window sinks softcap out lse=
        recent=""",
    "attention.check_attention_backend": "name device",
    "attention.paged_attention": """
        query pages * layout query_start_loc seq_lens block_tables scale k_scale v_scale
        sliding_window= sinks= softcap= batch_invariant= return_lse= backend= out= plans=
        transform= recent= new=""",
    "checkpoints.fingerprint": "folder",
    "checkpoints.read_declaration": "folder config",
    "checkpoints.read_kv_scales": "folder",
    "engine.LLM": """
        model tokenizer= * kv_cache_dtype= v_cache_dtype= dtype= device= block_size= num_pages=
        max_model_len= max_batched_tokens= max_num_seqs= kv_scales= kv_recipe= attention_backend=
        linear_backend= moe_backend= quantize_activations= batch_invariant= cuda_graphs=
        torch_compile= gpu_memory_utilization= max_num_batched_tokens= enforce_eager=""",
    "engine.LLM.chat": """
        self messages sampling_params= * use_tqdm= chat_template= add_generation_prompt=
        continue_final_message= tools= chat_template_kwargs=""",
    "engine.LLM.generate": "self prompts sampling_params= * use_tqdm=",
    "engine.LLM.stream": "self prompts sampling_params=",
    "engine.RequestOutput": "prompt prompt_token_ids outputs",
    "kvcache.ChunkedLocalAttentionSpec": """
        block_size num_kv_heads head_size head_size_v= kv_cache_dtype= dtype= v_cache_dtype=
        page_size_padded= attention_chunk_size=""",
    "kvcache.FullAttentionSpec": """
        block_size num_kv_heads head_size head_size_v= kv_cache_dtype= dtype= v_cache_dtype=
        page_size_padded=""",
    "kvcache.KVCacheQuantMethod": "dtype",
    "kvcache.KVCacheQuantMethod.compute_cell_size": "self head_num head_dim num_layers kv_size=",
    "kvcache.KVCacheQuantMethod.create_buffers": "self size head_num head_dim layer_num device",
    "kvcache.KVCacheQuantMethod.dequantize_prev_kv": """
        self k k_scales v v_scales layer_id= dtype= * k_scale= v_scale=""",
    "kvcache.KVCacheQuantMethod.load_scales_from_model": "self model",
    "kvcache.KVCacheQuantMethod.needs_dequant_workspace": "self",
    "kvcache.KVCacheQuantMethod.needs_global_scale": "self",
    "kvcache.KVCacheQuantMethod.quantize_and_store": """
        self k_buffer v_buffer k_scale_buffer v_scale_buffer loc cache_k cache_v k_scale=
        v_scale=""",
    "kvcache.PagedKVPool": "plan num_pages device=",
    "kvcache.PagedKVPool.from_shards": "shards pages=",
    "kvcache.PagedKVPool.shard": "self rank world_size pages=",
    "kvcache.SequenceTables": "pool * can_grow= recent=",
    "kvcache.SequenceTables.move_in": "self seq host",
    "kvcache.SequenceTables.move_out": "self seq",
    "kvcache.SlidingWindowSpec": """
        block_size num_kv_heads head_size head_size_v= kv_cache_dtype= dtype= v_cache_dtype=
        page_size_padded= sliding_window=""",
    "kvcache.dequant_nvfp4_kv_cache": """
        fp4_data block_scale global_scale head_size= block_size= * scale_layout= dtype=""",
    "kvcache.get_kv_cache_quant_method": "name",
    "kvcache.nvfp4_kv_cache_full_dim": "head_size",
    "kvcache.nvfp4_kv_cache_split_views": "kv_cache",
    "kvcache.plan_kv_cache": "specs * unify=",
    "kvcache.read_tokens": """
        pages slots layout k_scale v_scale dtype= * transform= positions=""",
    "kvcache.reshape_and_cache": """
        key value pages slot_mapping layout k_scale v_scale backend= * transform= positions=
        recent=""",
    "layouts.KVCacheDType.from_checkpoint": "config",
    "layouts.KVCacheDType.parse": "name",
    "layouts.PageLayout": """
        k_dtype v_dtype head_size head_size_v num_kv_heads block_size order= v_scale_layout=""",
    "layouts.page_stride": "pages",
    "layouts.swizzle_128x4": "scales",
    "layouts.unswizzle_128x4": "swizzled rows columns",
    "layouts.v_scale_position": "num_tokens num_blocks layout device",
    "linear.NvFp4Linear": """
        in_features out_features bias= * part_sizes= quantize_activations= dtype= device= backend=
        batch_invariant= dialect= m_hint=""",
    "linear.NvFp4Linear.from_float": """
        linear * recipe= input_amax= part_sizes= **options""",
    "linear.NvFp4Linear.load_tensors": "self tensors dialect= * copy=",
    "linear.NvFp4Linear.process_weights_after_loading": "self",
    "linear.NvFp4LinearKernel": "config",
    "linear.NvFp4LinearKernel.apply_weights": "self layer x bias=",
    "linear.NvFp4LinearKernel.can_implement": "config",
    "linear.NvFp4LinearKernel.is_supported": "compute_capability=",
    "linear.NvFp4LinearKernel.process_weights_after_loading": "self layer",
    "linear.NvFp4LinearLayerConfig": """
        n k dtype has_bias= quantize_activations= batch_invariant= m_hint= part_sizes= device_type=
        compute_capability=""",
    "linear.init_nvfp4_linear_kernel": "config linear_backend=",
    "linear.select_nvfp4_linear_kernel": "config linear_backend=",
    "models.Cache": """
        model kv_cache_dtype= * v_cache_dtype= block_size= kv_scales= kv_recipe=
        attention_backend=""",
    "models.calibrate": "model input_ids source headroom= * first_tokens=",
    "models.check_layer_dtypes": "kv_cache_dtype",
    "models.check_supported": "config",
    "models.find_kv_scales": "folder config * given= recipe=",
    "models.layer_specs": """
        config dtype kv_cache_dtype= block_size= * v_cache_dtype= keep_all= recipe=""",
    "models.load_model": """
        path * dtype= device= linear_backend= quantize_activations= batch_invariant=
        moe_backend=""",
    "models.load_tokenizer": "path",
    "models.register": "",
    "models.resolve_kv_scales": "model dtypes * given= tokenizer= recipe=",
    "moe.NvFp4Experts": """
        num_experts hidden_size intermediate_size bias= * activation= dtype= device= backend=
        batch_invariant= dialect=""",
    "moe.init_moe_kernel": "config backend=",
    "moe.moe_experts": """
        hidden experts topk_ids topk_weights * batch_invariant= backend=""",
    "moe.route": "x gate top_k * bias= renormalize= padding=",
    "moe.route_reference": "x gate top_k * bias= renormalize= padding=",
    "moe.select_moe_kernel": "config backend=",
    "numerics.nvfp4.dequantize": "data scales global_scale dtype=",
    "numerics.nvfp4.global_scale_from_amax": "amax recipe=",
    "numerics.nvfp4.quantize": "x global_scale recipe=",
    "quantization.quantize_checkpoint": """
        source destination * dialect= weights= recipe= method= kv_cache_dtype= calibration_file=
        ignore= max_shard_bytes= replace= on_progress=""",
}
"""In order; `=` marks those with a default, and those after `*` are given by keyword."""

SAMPLING_PARAMS = """
    max_tokens temperature top_k top_p seed stop stop_token_ids ignore_eos n min_p
    repetition_penalty presence_penalty frequency_penalty min_tokens logprobs"""

COMMANDS = "generate eval chat info quantize calibrate serve bench"


def test_names_of_halfbyte() -> None:
    halfbyte = import_module("halfbyte")
    own = "Cache LLM RequestOutput SamplingParams __version__ load_model"
    assert sorted(halfbyte.__all__) == own.split()
    assert set(dir(halfbyte)) == {*own.split(), *NAMES} - {"engine"}
    for name in halfbyte.__all__:
        assert getattr(halfbyte, name) is not None
    assert halfbyte.LLM is import_module("halfbyte.engine").LLM
    assert halfbyte.load_model is import_module("halfbyte.models").load_model


@pytest.mark.parametrize("package", NAMES)
def test_names_of_packages(package: str) -> None:
    module = import_module(f"halfbyte.{package}")
    assert sorted(module.__all__) == sorted(NAMES[package].split())
    for name in module.__all__:
        assert hasattr(module, name)


def test_every_function_of_a_package_is_listed() -> None:
    functions = {
        f"{package}.{name}"
        for package in NAMES
        for name in NAMES[package].split()
        if inspect.isfunction(_named(f"{package}.{name}"))
    }
    assert functions - set(PARAMETERS) == set()


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_classes(name: str) -> None:
    of_enum = getattr(_named(name), "__members__", {})
    members = {
        member
        for base in _named(name).__mro__
        if base.__module__.startswith("halfbyte.")
        for member in vars(base)
        if not member.startswith("_") and member not in of_enum
    }
    assert sorted(members) == sorted(MEMBERS[name].split())


def test_formats_stay() -> None:
    """A new one needs no line here: it is a row of `KV_FORMATS`."""
    assert set(FORMATS.split()) <= set(_named("layouts.KVCacheDType").__members__)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert _parameters(_named(name)) == PARAMETERS[name].split()


def test_fields_of_sampling_params() -> None:
    names = [field.name for field in fields(_named("engine.SamplingParams"))]
    assert names == SAMPLING_PARAMS.split()


def test_commands() -> None:
    app = import_module("halfbyte.cli").app
    commands = [command.name for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    assert sorted(commands + groups) == sorted(COMMANDS.split())


def _named(name: str) -> Any:
    """Of a package, a module of it, or a class there."""
    package, *rest = name.split(".")
    value: Any = import_module(f"halfbyte.{package}")
    for part in rest:
        value = getattr(value, part)
    return value


def _parameters(function: Any) -> list[str]:
    """As in `PARAMETERS`."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        default = "" if parameter.default is parameter.empty else "="
        found.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return found
