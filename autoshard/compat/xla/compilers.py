"""The compilers for hardware that is not here: which is installed, and does it fit this jax.

Read from the metadata of the installed packages alone: asking costs milliseconds and loads no
compiler. jax itself states which libtpu it was built for (its extra `tpu`); the CUDA plugin and its
compiler (`jax-cuda12-plugin`, `jax-cuda12-pjrt`, or cuda13) must be of jaxlib's own version. The
options that compilers are given are here too: they read them from the environment.
"""

import dataclasses
import importlib.metadata
import os
import re

from autoshard.compat.xla.deviceless import XLA_FLAGS
from autoshard.errors import TargetError

CUDA_VERSIONS = ("12", "13")
"""Releases of CUDA that jax has plugins for; where both are installed, the first one that fits."""

_FAKE_DEVICES = "--xla_force_host_platform_device_count"

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?(?P<spec>[^;)]*)\)?")
_CLAUSE = re.compile(r"(==|>=|<=|<|>|!=|~=)\s*([0-9][0-9A-Za-z.+*-]*)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A package that a compiler consists of, and which versions of it fit."""

    package: str
    expected: str
    because: str


def install_command(platform: str) -> str:
    """The command that installs the platform's compiler, of the version that fits the jax here."""
    _check(platform)
    return f"pip install 'autoshard[{platform}]'"


def compiler_version(platform: str) -> str | None:
    """What compiles for a platform here, e.g. "libtpu 0.0.42.1" or "jax-cuda12-plugin 0.10.2".

    Args:
      platform: "tpu" or "cuda".

    Returns:
      Package and version; None where no compiler is installed. Whether it fits the installed jax
      is another question: see `require_compiler`.

    Raises:
      TargetError: another platform.
    """
    found = [parts[0].package for parts in _choices(platform) if _version(parts[0].package)]
    fitting = [p for p in found if not any(map(_misfit, _parts_of(platform, p)))]
    for package in [*fitting, *found]:
        return f"{package} {_version(package)}"
    return None


def compilers_here(lowered_for: str | None) -> str:
    """The versions and options that decide what a module is compiled to, such as `jaxlib 0.10.2`.

    Args:
      lowered_for: "tpu" or "cuda" for hardware that is not here; None for this machine's own CPUs.
    """
    versions = f"jaxlib {_version('jaxlib')}"
    if lowered_for is not None:
        versions += f", {compiler_version(lowered_for)}"
    options = compiler_options(lowered_for or "cpu", deviceless=lowered_for is not None)
    return f"{versions} with {options}" if options else versions


def compiler_options(platform: str, *, deviceless: bool = False) -> str:
    """The options that a compiler takes from this process's environment; "" for none.

    Where nothing but the place of a dump is named, it is an option too.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu".
      deviceless: for hardware that is not here.

    Returns:
      XLA_FLAGS, and for TPUs LIBTPU_INIT_ARGS, each sorted; of an option given twice the last,
      which counts. Without what says how many devices a CPU makes, and without what is set anyway.
    """
    ours = {_FAKE_DEVICES}
    if deviceless:
        ours |= _named(XLA_FLAGS).keys()
    variables = ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if platform == "tpu" else ("XLA_FLAGS",)
    found: list[str] = []
    for variable in variables:
        named = _named(os.environ.get(variable, ""))
        found += sorted(option for name, option in named.items() if name not in ours)
    return " ".join(found)


def _named(options: str) -> dict[str, str]:
    """Name -> the last option of it, `--name=value`."""
    return {option.partition("=")[0]: option for option in options.split()}


def require_compiler(platform: str) -> str:
    """Makes sure that the platform's compiler is installed and fits the installed jax.

    Args:
      platform: "tpu" or "cuda".

    Returns:
      Package and version, as `compiler_version`.

    Raises:
      TargetError: it is missing, or of a version that this jax cannot use; the message names the
        versions and the command that puts it right.
    """
    chosen = compiler_version(platform)
    command = install_command(platform)
    if chosen is None:
        names = " or ".join(parts[0].package for parts in _choices(platform))
        raise TargetError(
            f"the compiler for {platform!r} is not installed ({names} not found): {command}"
        )
    wrong = [text for part in _parts_of(platform, chosen.split()[0]) if (text := _misfit(part))]
    if wrong:
        raise TargetError(
            f"the compiler for {platform!r} does not fit the installed jax "
            f"{_version('jax')} (jaxlib {_version('jaxlib')}): {'; '.join(wrong)}. "
            f"Run {command} in this environment, or install those versions"
        )
    return chosen


def _choices(platform: str) -> tuple[tuple[_Part, ...], ...]:
    """The sets of packages that each make a compiler; the first of a set gives it its name."""
    _check(platform)
    if platform == "tpu":
        expected = _requirement_of_jax("libtpu", extra="tpu")
        return ((_Part(package="libtpu", expected=expected, because="jax's extra 'tpu'"),),)
    jaxlib = _version("jaxlib")
    expected = f"=={jaxlib}" if jaxlib else ""
    return tuple(
        tuple(
            _Part(package=f"jax-cuda{cuda}-{kind}", expected=expected, because="jaxlib's version")
            for kind in ("plugin", "pjrt")
        )
        for cuda in CUDA_VERSIONS
    )


def _parts_of(platform: str, package: str) -> tuple[_Part, ...]:
    return next(parts for parts in _choices(platform) if parts[0].package == package)


def _check(platform: str) -> None:
    if platform not in ("tpu", "cuda"):
        raise TargetError(f"got platform {platform!r}, expected 'tpu' or 'cuda'")


def _misfit(part: _Part) -> str:
    """What is wrong with a package; "" where nothing is, or where jax states nothing."""
    version = _version(part.package)
    if version is not None and _fits(version, part.expected):
        return ""
    got = f"{part.package} {version}" if version else f"no {part.package}"
    return f"got {got}, expected {part.package}{part.expected} ({part.because})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement_of_jax(package: str, extra: str) -> str:
    """The versions of a package that an extra of the installed jax asks for; "" if none."""
    try:
        lines = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        match = _REQUIREMENT.match(line)
        in_extra = re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", line)
        if match and in_extra and match["name"].lower() == package:
            return match["spec"].strip()
    return ""


def _fits(version: str, specifier: str) -> bool:
    """Whether a version is one of those a specifier names, e.g. "==0.0.42.*" or ">=1.2,<2".

    Only release numbers count: jax states nothing else of its compilers.
    """
    got = _release(version)
    for operator, text in _CLAUSE.findall(specifier):
        want = _release(text)
        if operator in ("==", "!="):
            same = got[: len(want)] == want if text.endswith(".*") else _equal(got, want)
            good = same == (operator == "==")
        elif operator == "~=":
            good = got >= want and got[: len(want) - 1] == want[:-1]
        elif operator in (">=", "<="):
            good = _equal(got, want) or (got > want) == (operator == ">=")
        else:
            good = not _equal(got, want) and (got > want) == (operator == ">")
        if not good:
            return False
    return True


def _equal(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """1.2 and 1.2.0 are one release."""
    size = max(len(a), len(b))
    return a + (0,) * (size - len(a)) == b + (0,) * (size - len(b))


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()
