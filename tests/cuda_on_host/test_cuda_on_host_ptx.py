"""CUDA on the CPU: inline assembly does what PTX says, and shared memory is watched."""

import ctypes
from pathlib import Path

import pytest
import torch

from cuda_on_host import build, launch, needs_compiler

pytestmark = needs_compiler

SOURCE = """
typedef unsigned u32;
typedef unsigned long long u64;
struct Params { const unsigned char* in; u32* out; int offset; };

extern "C" __global__ void garbage(Params p) {
  extern __shared__ __align__(128) u32 words[];
  p.out[threadIdx.x] = words[threadIdx.x];
  words[threadIdx.x] = 0;
}

extern "C" __global__ void copies(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const u32 to = (u32)__cvta_generic_to_shared(words) + threadIdx.x * 64;
  words[threadIdx.x * 16] = 1;
  for (int i = 0; i < 3; i++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 16), "l"(p.in),
                 "r"(8));
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
  for (int i = 0; i < 12; i++) p.out[threadIdx.x * 12 + i] = words[threadIdx.x * 16 + i];
}

// Those of even lanes alone; the others keep what they have stored.
extern "C" __global__ void some_copies(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const u32 to = (u32)__cvta_generic_to_shared(words) + threadIdx.x * 16;
  const int wanted = threadIdx.x % 2 == 0;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(5), "r"(6) : "memory");
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}"
               ::"r"(to), "l"(p.in), "r"(wanted));
  asm volatile("cp.async.wait_all;" ::: "memory");
  u32 x, y;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(to));
  p.out[threadIdx.x * 2] = x, p.out[threadIdx.x * 2 + 1] = y;
}

// Even lanes copy 16 bytes; a barrier counts all lanes when their copies have ended. With an
// offset nobody waits for it.
extern "C" __global__ void counted_copies(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const u32 barrier = (u32)__cvta_generic_to_shared(words), to = barrier + 128 + threadIdx.x * 16;
  if (threadIdx.x == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(32) : "memory");
  __syncwarp();
  if (threadIdx.x % 2 == 0)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p.in));
  else
    words[32 + threadIdx.x * 4] = 9;
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  u32 done = p.offset;
  while (!done)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(0)
        : "memory");
  p.out[threadIdx.x] = words[32 + threadIdx.x * 4];
}

// Lane 0 copies, and waits if the offset is odd; then lane 1 loads, stores or copies there.
extern "C" __global__ void pending(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const u32 to = (u32)__cvta_generic_to_shared(words), at = to + 12;
  const int what = threadIdx.x == 1 ? p.offset / 2 : 3;
  u32 x = 7;
  if (threadIdx.x == 0)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p.in));
  if (p.offset % 2) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  if (what == 0) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
  if (what == 1) asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x));
  if (what == 2) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(p.in));
  __syncwarp();
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  p.out[threadIdx.x] = threadIdx.x == 1 ? x : words[3];
}

extern "C" __global__ void beyond(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const u32 address = (u32)__cvta_generic_to_shared(words) + p.offset;
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(1.0f) : "memory");
}

#if BF16
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MATMUL "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
// A [16, 16] and the transpose of B, [8, 16].
extern "C" __global__ void matmul(Params p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  const int lane = threadIdx.x;
  for (int i = lane; i < 24 * 32; i += 32) bytes[i] = p.in[i];
  __syncwarp();
  const u32 address = (u32)__cvta_generic_to_shared(bytes);
  u32 a[4], b[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address + lane % 16 * 32 + lane / 16 * 16)
               : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address + 512 + lane % 8 * 32 + lane / 8 % 2 * 16)
               : "memory");
  float c[4] = {1, 2, 3, 4};
  asm volatile(MATMUL "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  float* out = (float*)p.out + lane / 4 * 8 + lane % 4 * 2;
  for (int i = 0; i < 4; i++) out[i / 2 * 64 + i % 2] = c[i];
}

// Four of 8 x 8, by each of two ways to transpose them.
extern "C" __global__ void transposes(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; i++) words[i * 32 + lane] = ((const u32*)p.in)[i * 32 + lane];
  __syncwarp();
  const u32 address = (u32)__cvta_generic_to_shared(words) + lane * 16;
  u32 a[4], b[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
  for (int i = 0; i < 4; i++) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(b[i]));
    p.out[i * 32 + lane] = a[i], p.out[128 + i * 32 + lane] = y;
  }
}

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
__device__ __forceinline__ void wgmma(float (*d)[4], const u32* a, u64 b, bool add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// Twice A [16, 16] and the transpose of B, [32, 16]; or what a kernel may not do before it waits.
extern "C" __global__ void wide_matmul(Params p) {
  extern __shared__ __align__(1024) unsigned short b_halves[];
  const int lane = threadIdx.x;
  const unsigned short *a_in = (const unsigned short*)p.in, *b_in = a_in + 256;
  for (int i = lane; i < 512; i += 32) {
    const int n = i / 16, k = i % 16;
    b_halves[n / 8 * 128 + k / 8 * 64 + n % 8 * 8 + k % 8] = b_in[i];
  }
  u32 a[4];
  for (int i = 0; i < 4; i++)
    a[i] = *(const u32*)(a_in + (lane / 4 + i % 2 * 8) * 16 + i / 2 * 8 + lane % 4 * 2);
  __syncwarp();
  const u32 address = (u32)__cvta_generic_to_shared(b_halves);
  const u64 b = (u64)(256 / 16) << 32 | (128 / 16) << 16 | address / 16;
  float d[4][4];
  wgmma(d, a, b, false);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  wgmma(d, a, b, true);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if (p.offset == 1) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(1) : "memory");
  if (p.offset == 2) a[1] ^= 1;
  if (p.offset == 3) b_halves[lane] = 0x7E00;
  if (p.offset != 1) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(0) : "memory");
  float* out = (float*)p.out + lane / 4 * 32 + lane % 4 * 2;
  for (int n = 0; n < 4; n++)
    for (int i = 0; i < 4; i++) out[i / 2 * 256 + n * 8 + i % 2] = d[n][i];
}

// Four of 8 x 8 loaded transposed, and stored so.
extern "C" __global__ void matrices_there_and_back(Params p) {
  extern __shared__ __align__(128) u32 words[];
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; i++) words[i * 32 + lane] = ((const u32*)p.in)[i * 32 + lane];
  __syncwarp();
  const u32 address = (u32)__cvta_generic_to_shared(words) + lane * 16;
  u32 a[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address + 512),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
  __syncwarp();
  for (int i = 0; i < 4; i++) p.out[i * 32 + lane] = words[128 + i * 32 + lane];
}

extern "C" __global__ void vote(Params p) {
  p.out[threadIdx.x] = __syncthreads_or(threadIdx.x == p.offset);
  p.out[32 + threadIdx.x] = __syncthreads_or(false);
}

// Bits as they are picked from others, and whether any lane has one.
extern "C" __global__ void bits(Params p) {
  const u32* in = (const u32*)p.in + 4 * threadIdx.x;
  u32 x;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(x) : "r"(in[0]), "r"(in[1]), "r"(in[2]));
  u32* out = p.out + 4 * threadIdx.x;
  out[0] = __byte_perm(in[0], in[1], in[2]), out[1] = x;
  out[2] = __any_sync(~0u, in[3] == p.offset), out[3] = 0;
}

extern "C" __global__ void e4m3(Params p) {
  const unsigned short* in = (const unsigned short*)p.in;
  for (int i = threadIdx.x; i < 128; i += 32) {
    u32 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(in[i]));
    p.out[i] = y;
  }
}

// Pairs, each with the one as far from the other end.
extern "C" __global__ void halves(Params p) {
  const u32* in = (const u32*)p.in;
  for (int i = threadIdx.x; i < p.offset; i += 32) {
    const u32 x = in[i], y = in[p.offset - 1 - i];
    u32 product, other;
    float wide;
#if BF16
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(other) : "r"(x), "r"(y), "r"(x));
#else
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)x));
    other = *(u32*)&wide;
#endif
    p.out[i] = product, p.out[p.offset + i] = other;
  }
}
"""


class Params(ctypes.Structure):
    _fields_ = (("input", ctypes.c_void_p), ("out", ctypes.c_void_p), ("offset", ctypes.c_int))


DTYPES = {1: torch.bfloat16, 0: torch.float16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "some.cu").write_text(SOURCE)
    return folder


def run(
    folder: Path,
    name: str,
    given: torch.Tensor | None = None,
    *,
    size: int = 400,
    offset: int = 0,
    grid: int = 1,
    shared_bytes: int = 4096,
    bf16: int = 1,
) -> torch.Tensor:
    """What a warp writes: int32 `[size]`."""
    out = torch.zeros(size, dtype=torch.int32)
    given = torch.zeros(16) if given is None else given.contiguous()
    params = Params(given.data_ptr(), out.data_ptr(), offset)
    kernel = getattr(build("some.cu", {"BF16": bf16}, folder), name)
    launch(kernel, grid, 32, params, shared_bytes=shared_bytes)
    return out


def test_shared_memory_of_every_cta_begins_with_garbage(folder: Path) -> None:
    assert (run(folder, "garbage", grid=2)[:32] == -1).all()


def test_copies_arrive_when_they_are_waited_for(folder: Path) -> None:
    out = run(folder, "copies", torch.arange(1, 5, dtype=torch.int32))
    assert out[:384].view(32, 12).unique(dim=0).tolist() == [[1, 2, 0, 0] * 2 + [-1] * 4]


def test_copies_of_some_lanes(folder: Path) -> None:
    out = run(folder, "some_copies", torch.arange(1, 5, dtype=torch.int32))[:64].view(32, 2)
    assert out.tolist() == [[1, 2], [5, 6]] * 16


def test_a_barrier_counts_copies(folder: Path) -> None:
    given = torch.arange(1, 5, dtype=torch.int32)
    assert run(folder, "counted_copies", given)[:32].tolist() == [1, 9] * 16
    with pytest.raises(RuntimeError, match="ends before all bytes have come to it"):
        run(folder, "counted_copies", given, offset=1)


@pytest.mark.parametrize(("what", "wanted"), [(0, [4, 4]), (1, [7, 7]), (2, [1, 7])])
def test_targets_of_pending_copies_are_not_touched(
    folder: Path, what: int, wanted: list[int]
) -> None:
    given = torch.arange(1, 5, dtype=torch.int32)
    assert run(folder, "pending", given, offset=2 * what + 1)[:2].tolist() == wanted
    with pytest.raises(RuntimeError, match=r"thread 1: a copy to offset 12 .* is pending"):
        run(folder, "pending", given, offset=2 * what)


@pytest.mark.parametrize("offset", [-4, 2, 124, 126, 128])
def test_shared_memory_ends(folder: Path, offset: int) -> None:
    if offset == 124:
        run(folder, "beyond", offset=offset, shared_bytes=128)
        return
    message = f"block 0, thread .*: 4 bytes at offset {offset} of 128 bytes"
    with pytest.raises(RuntimeError, match=message):
        run(folder, "beyond", offset=offset, shared_bytes=128)


@pytest.mark.parametrize("bf16", [0, 1])
def test_matrices(folder: Path, bf16: int) -> None:
    matrices = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).to(DTYPES[bf16])
    out = run(folder, "matmul", matrices, bf16=bf16).view(torch.float32)[:128].view(16, 8)
    wanted = matrices[:16].double() @ matrices[16:].double().t()
    wanted += torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]).repeat(1, 8, 4).view(16, 8)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_matmuls_of_sm90(folder: Path, seed: int) -> None:
    matrices = torch.randn(48, 16, generator=torch.Generator().manual_seed(seed)).half()
    wanted = 2 * matrices[:16].double() @ matrices[16:].double().t()
    out = run(folder, "wide_matmul", matrices, size=512).view(torch.float32).view(16, 32)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-6, atol=1e-6)
    early = run(folder, "wide_matmul", matrices, size=512, offset=1).view(torch.float32)
    assert early.isnan().all()
    with pytest.raises(RuntimeError, match="A changes under a matmul"):
        run(folder, "wide_matmul", matrices, size=512, offset=2)
    spoilt = run(folder, "wide_matmul", matrices, size=512, offset=3).view(torch.float32)
    assert spoilt.isnan().any()


def test_matrices_are_stored_transposed_as_they_are_loaded(folder: Path) -> None:
    matrices = torch.arange(256, dtype=torch.int16)
    out = run(folder, "matrices_there_and_back", matrices)[:128].view(torch.int16)
    assert torch.equal(out, matrices)


@pytest.mark.parametrize("offset", [0, 17, 40])
def test_votes_of_a_cta(folder: Path, offset: int) -> None:
    out = run(folder, "vote", offset=offset)
    assert (out[:32] == (offset < 32)).all()
    assert not out[32:64].any()


def test_transposed_matrices(folder: Path) -> None:
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = run(folder, "transposes", matrices)[:256].view(torch.int16).view(2, 4, 8, 8)
    assert torch.equal(out, matrices.mT.expand(2, 4, 8, 8))


def test_bits(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(-(2**31), 2**31, (32, 4), generator=generator).int()
    given[:, 3] = torch.arange(32)
    for offset in (31, 32):
        out = run(folder, "bits", given, offset=offset)[:128].view(32, 4)
        for (a, b, c, _), (permuted, selected, any_is, _) in zip(
            given.tolist(), out.tolist(), strict=True
        ):
            both = (a & 2**32 - 1 | b << 32 & 2**64 - 2**32).to_bytes(8, "little")
            nibbles = [c >> 4 * i & 15 for i in range(4)]
            wanted = bytes(both[n & 7] if n < 8 else both[n & 7] // 128 * 255 for n in nibbles)
            assert permuted == int.from_bytes(wanted, "little", signed=True)
            assert selected == a & c | b & ~c
            assert any_is == (offset == 31)


def test_e4m3(folder: Path) -> None:
    x = torch.arange(256, dtype=torch.uint8)
    out = run(folder, "e4m3", x)[:128].view(torch.float16)
    wanted = x.view(torch.float8_e4m3fn).to(torch.float16)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bf16", [0, 1])
def test_halves(folder: Path, bf16: int) -> None:
    dtype = DTYPES[bf16]
    bits = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int16).view(dtype)
    pairs = len(x) // 2
    out = run(folder, "halves", x, size=2 * pairs, offset=pairs, bf16=bf16)
    y = x.view(-1, 2).flip(0).flatten()
    torch.testing.assert_close(out[:pairs].view(dtype), x * y, rtol=0, atol=0, equal_nan=True)
    others = out[pairs:]
    if bf16:
        wanted = (x.double() * y.double() + x.double()).float().to(dtype)
        torch.testing.assert_close(others.view(dtype), wanted, rtol=0, atol=0, equal_nan=True)
    else:
        wanted = x[::2].float()
        torch.testing.assert_close(
            others.view(torch.float32), wanted, rtol=0, atol=0, equal_nan=True
        )
