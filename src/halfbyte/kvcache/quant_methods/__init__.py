"""Cache formats by name.

The registry imports all files of this folder; each class lists the formats that it implements
(`FORMATS`).
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from halfbyte.kvcache.quant_methods.base import KVCacheQuantMethod
from halfbyte.layouts import KVCacheDType
from halfbyte.layouts.formats import KV_FORMATS


def _methods() -> Iterator[type[KVCacheQuantMethod]]:
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        for found in vars(module).values():
            is_class = isinstance(found, type) and found.__module__ == module.__name__
            if is_class and issubclass(found, KVCacheQuantMethod):
                yield found


def _registry() -> dict[str, type[KVCacheQuantMethod]]:
    """In the order of `KV_FORMATS`.

    Raises:
        ValueError: a class names a format that has no row, or another class's.
    """
    found: dict[str, type[KVCacheQuantMethod]] = {}
    for method in _methods():
        for name in method.FORMATS:
            if name not in KV_FORMATS:
                raise ValueError(
                    f"{method.__name__}.FORMATS: {name} has no row in KV_FORMATS "
                    "(layouts/formats.py)"
                )
            if found.setdefault(name, method) is not method:
                raise ValueError(f"{method.__name__}.FORMATS: {name} is in {found[name].__name__}")
    return {name: found[name] for name in KV_FORMATS if name in found}


KV_CACHE_QUANT_REGISTRY = _registry()
"""The class of every format, which is made with the format's `KVCacheDType`."""


def get_kv_cache_quant_method(name: str | KVCacheDType) -> KVCacheQuantMethod:
    """A new instance of the method of a format's name or alias.

    Raises:
        ValueError: unknown name, or `auto`, which must be resolved first.
    """
    dtype = KVCacheDType.parse(name)
    if dtype.value not in KV_CACHE_QUANT_REGISTRY:
        valid = ", ".join(KV_CACHE_QUANT_REGISTRY)
        raise ValueError(
            f"KV cache format: no class in kvcache/quant_methods has {dtype}; expected {valid}"
        )
    return KV_CACHE_QUANT_REGISTRY[dtype.value](dtype)


__all__ = ["KV_CACHE_QUANT_REGISTRY", "KVCacheQuantMethod", "get_kv_cache_quant_method"]
