"""C++ replacements of inline assembly on the CPU, by the statement's text; used by `build`."""

HERE = "cuda_on_host::"
_MATMULS = {
    "MATMUL": "MATMUL",  # a macro of the source
    **{
        text: f'"{text}"'
        for text in (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        )
    },
}
"""Instructions, and the C++ functions that replace them."""


def _wgmma(columns: int) -> str:
    """Text of a matmul of halves with so many columns; its C++ goes by the names around it."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return (
        f"{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, {{{a}}}, "
        f"%{count + 4}, p, 1, 1, 0;}}"
    )


ASSEMBLY = {
    "": "",
    "ex2.approx.ftz.f32 %0, %1;": f"%0 = {HERE}flush(std::exp2({HERE}flush(%1)))",
    "rcp.approx.ftz.f32 %0, %1;": f"%0 = {HERE}approximate_inverse(%1)",
    "max.NaN.f32 %0, %1, %2;": "%0 = !(%1 == %1) ? %1 : %2 > %1 || !(%2 == %2) ? %2 : %1",
    "{.reg .pred p; setp.lt.f32 p, %1, %2; @p sub.rn.f32 %0, %3, %4;}": (
        "%0 = %1 < %2 ? %3 - %4 : %0"
    ),
    "{.reg .pred p; setp.ge.f32 p, %1, %2; @p sub.rn.f32 %0, %3, %4;}": (
        "%0 = %1 >= %2 ? %3 - %4 : %0"
    ),
    "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;": f"%0 = {HERE}to_e4m3(%1) << 8 | {HERE}to_e4m3(%2)",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": f"%0 = {HERE}to_bfloat16(%1) << 16 | {HERE}to_bfloat16(%2)",
    "cvt.rn.f16x2.f32 %0, %1, %2;": f"%0 = {HERE}to_float16(%1) << 16 | {HERE}to_float16(%2)",
    "cvt.f32.f16 %0, %1;": f"%0 = {HERE}of_float16(%1)",
    "mul.bf16x2 %0, %1, %2;": f"%0 = {HERE}fma_bfloat16x2(%1, %2, 0x80008000u)",
    "fma.rn.bf16x2 %0, %1, %2, %3;": f"%0 = {HERE}fma_bfloat16x2(%1, %2, %3)",
    "mul.f16x2 %0, %1, %2;": f"%0 = {HERE}multiply_float16x2(%1, %2)",
    "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}": (
        "%0 = (%1 & 0xFFFF) * 0x10001u"
    ),
    "{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}": (
        "%0 = (%1 >> 16) * 0x10001u"
    ),
    "cvt.rn.f16x2.e4m3x2 %0, %1;": f"%0 = {HERE}of_e4m3x2(%1)",
    # The table of a function of three bits: here the third chooses among the others.
    "lop3.b32 %0, %1, %2, %3, 0xe4;": "%0 = (%1 & %3) | (%2 & ~%3)",
    "max.f16x2 %0, %1, %2;": f"%0 = {HERE}max_float16x2(%1, %2)",
    "mov.b64 %0, {%1, %2};": "%0 = (unsigned long long)(unsigned)(%2) << 32 | (unsigned)(%1)",
    "shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;": (
        f"%0 = {HERE}shuffle(~0u, %1, %2, __LINE__)"
    ),
    "mad.wide.u32 %0, %1, %2, %3;": "%0 = (unsigned long long)%1 * %2 + %3",
    "ld.global.f32 %0, [%1];": "%0 = *(const float*)(%1)",
    "ld.global.u8 %0, [%1];": "%0 = *(const unsigned char*)(%1)",
    "ld.global.u32 %0, [%1];": "%0 = *(const unsigned*)(%1)",
    "ld.global.v2.u32 {%0, %1}, [%2];": f"{HERE}unpack(*(const uint2*)(%2), %0, %1)",
    "ld.global.v4.u32 {%0, %1, %2, %3}, [%4];": (
        f"{HERE}unpack(*(const uint4*)(%4), %0, %1, %2, %3)"
    ),
    "ld.shared.f32 %0, [%1];": f"%0 = {HERE}load<float>(%1)",
    "ld.shared.u32 %0, [%1];": f"%0 = {HERE}load<unsigned>(%1)",
    "ld.shared.v2.f32 {%0, %1}, [%2];": f"{HERE}unpack({HERE}load<float2>(%2), %0, %1)",
    "ld.shared.v2.u32 {%0, %1}, [%2];": f"{HERE}unpack({HERE}load<uint2>(%2), %0, %1)",
    "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];": (
        f"{HERE}unpack({HERE}load<uint4>(%4), %0, %1, %2, %3)"
    ),
    "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];": (
        f"{HERE}unpack({HERE}load<float4>(%4), %0, %1, %2, %3)"
    ),
    "{.reg .u16 x; ld.shared.u16 x, [%1]; cvt.u32.u16 %0, x;}": (
        f"%0 = {HERE}load<unsigned short>(%1)"
    ),
    "ld.shared.u8 %0, [%1];": f"%0 = {HERE}load<unsigned char>(%1)",
    "st.shared.f32 [%0], %1;": f"{HERE}store<float>(%0, %1)",
    "st.shared.u32 [%0], %1;": f"{HERE}store<unsigned>(%0, %1)",
    "atom.shared.exch.b32 %0, [%1], %2;": f"%0 = {HERE}exchange(%1, %2)",
    "atom.shared.or.b32 %0, [%1], 0;": f"%0 = {HERE}load<unsigned>(%1)",
    "st.shared.v2.u32 [%0], {%1, %2};": f"{HERE}store<uint2>(%0, {{%1, %2}})",
    "st.shared.v2.f32 [%0], {%1, %2};": f"{HERE}store<float2>(%0, {{%1, %2}})",
    "st.shared.v4.u32 [%0], {%1, %2, %3, %4};": f"{HERE}store<uint4>(%0, {{%1, %2, %3, %4}})",
    "st.shared.v4.f32 [%0], {%1, %2, %3, %4};": f"{HERE}store<float4>(%0, {{%1, %2, %3, %4}})",
    "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;": f"{HERE}copy(%0, %1, 16, 16)",
    "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 4, %2;": f"{HERE}copy(%0, %1, 4, 4)",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": f"{HERE}copy(%0, %1, 16, %2)",
    "ld.volatile.global.s64 %0, [%1];": f"%0 = *(const long long*){HERE}found_at(%1)",
    "cp.async.cg.shared.global [%0], [%1], 16;": f"{HERE}copy(%0, %1, 16, 16)",
    "cp.async.ca.shared.global [%0], [%1], 16;": f"{HERE}copy(%0, %1, 16, 16)",
    "cp.async.ca.shared.global [%0], [%1], 4, %2;": f"{HERE}copy(%0, %1, 4, %2)",
    "cp.async.ca.shared.global [%0], [%1], 4;": f"{HERE}copy(%0, %1, 4, 4)",
    "{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}": (
        f"if (%2) {HERE}copy(%0, %1, 16, 16)"
    ),
    "cp.async.commit_group;": f"{HERE}commit_group()",
    "cp.async.wait_group %0;": f"{HERE}wait_group(%0)",
    "cp.async.wait_all;": f"{HERE}wait_all()",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": (
        f"{HERE}load_matrices(%0, %1, %2, %3, %4)"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": (
        f"{HERE}load_transposed_matrices(%0, %1, %2, %3, %4)"
    ),
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};": (
        f"{HERE}store_transposed_matrices(%0, %1, %2, %3, %4)"
    ),
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": f"%0 = {HERE}transpose(%1)",
    **{
        f"{instruction} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};": (
            f"{HERE}multiply_matrices({text}, %0, %1, %2, %3, %4, %5, %6, %7, %8, %9)"
        )
        for instruction, text in _MATMULS.items()
    },
    **{_wgmma(columns): f"{HERE}wgmma({columns}, &d[0][0], a, b, add)" for columns in (32, 64)},
    # Of kernels/runtime/wgmma.cuh, whose macros stand for themselves here.
    "WGMMA n ": f"{HERE}wgmma(n, d, a, b, add, X_BF16)",
    "WGMMA_ROWS n ": f"{HERE}wgmma(n, d, a, b, add, X_BF16, true)",
    "wgmma.fence.sync.aligned;": "",
    "wgmma.commit_group.sync.aligned;": f"{HERE}commit_matmuls()",
    "wgmma.wait_group.sync.aligned %0;": f"{HERE}wait_for_matmuls(%0)",
    "fence.proxy.async.shared::cta;": "",
    "fence.proxy.async.global;": "",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "",
    "mov.u32 %0, %%tid.x;": "%0 = threadIdx.x",
    "mov.u32 %0, %%cluster_ctarank;": f"%0 = {HERE}cluster_rank()",
    "mapa.shared::cluster.u32 %0, %1, %2;": f"%0 = {HERE}map_to_rank(%1, %2)",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": f"{HERE}arrive_and_expect(*{HERE}cta, %0, 0)",
    "mbarrier.arrive.shared::cluster.b64 _, [%0];": f"{HERE}arrive_mapped(%0)",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];": f"{HERE}arrive_after_copies(%0)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        f"{HERE}copy_bulk(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;": (
        f"{HERE}copy_box(%0, %1, %2, %3, %4, %5)"
    ),
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %3, %4, %5}], [%6];": f"{HERE}copy_box_4d(%0, %1, %2, %3, %4, %5, %6)",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];": (
        f"{HERE}store_box(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.commit_group;": "",
    "cp.async.bulk.wait_group.read 0;": f"{HERE}wait_for_stores()",
    "cp.async.bulk.wait_group 0;": f"{HERE}wait_for_stores()",
    "bar.sync %0, %1;": f"{HERE}meet(%0, %1, true, false)",
    "bar.arrive %0, 256;": f"{HERE}meet(%0, 256, false, false)",
    "bar.sync %0, 256;": f"{HERE}meet(%0, 256, true, false)",
    "bar.sync %0, 128;": f"{HERE}meet(%0, 128, true, false)",
    "bar.sync 3, 256;": f"{HERE}meet(3, 256, true, false)",
    "bar.arrive 3, 256;": f"{HERE}meet(3, 256, false, false)",
    "bar.sync %0, 160;": f"{HERE}meet(%0, 160, true, false)",
    "bar.arrive %0, 160;": f"{HERE}meet(%0, 160, false, false)",
    "{.reg .pred p, q; setp.ne.u32 q, %1, 0; bar.red.or.pred p, %2, %3, q; "
    "selp.u32 %0, 1, 0, p;}": f"%0 = {HERE}meet(%2, %3, true, %1)",
    "st.relaxed.gpu.global.u64 [%0], %1;": f"{HERE}set_flag(%0, %1)",
    "st.release.gpu.global.u64 [%0], %1;": f"{HERE}set_flag(%0, %1)",
    "red.release.gpu.global.add.u64 [%0], %1;": f"{HERE}add_to_flag(%0, %1)",
    "ld.relaxed.gpu.global.u64 %0, [%1];": "%0 = *(%1)",
    "ld.acquire.gpu.global.u64 %0, [%1];": f"%0 = {HERE}look_at_flag(%1)",
    "prefetch.tensormap [%0];": "",
    "createpolicy.fractional.L2::evict_first.b64 %0, 1.0;": "%0 = 0",
    "prefetch.global.L2 [%0];": "",
    "griddepcontrol.wait;": f"{HERE}wait_for_previous_kernel()",
    "griddepcontrol.launch_dependents;": "",
    "fence.mbarrier_init.release.cluster;": "",
    "{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}": f"%0 = {HERE}elect()",
    "mbarrier.init.shared::cta.b64 [%0], %1;": f"{HERE}init_barrier(%0, %1)",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": (
        f"{HERE}arrive_and_expect(*{HERE}cta, %0, %1)"
    ),
    "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}": (
        f"%0 = {HERE}try_wait(%1, %2)"
    ),
    "barrier.cluster.arrive.release.aligned;": f"{HERE}arrive_at_cluster()",
    "barrier.cluster.arrive.relaxed.aligned;": f"{HERE}arrive_at_cluster()",
    "barrier.cluster.wait.acquire.aligned;": f"{HERE}wait_for_cluster()",
    "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;": f"{HERE}expect_mapped(%0, %1)",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];": (
        f"{HERE}send_floats(%0, %1, %2, %3, %4, %5)"
    ),
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %3, %4}], [%5];": f"{HERE}copy_boxes(%0, %1, %2, %3, %4, %5)",
}
