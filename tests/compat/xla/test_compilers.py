"""What is installed is faked: the tests need no compiler."""

import importlib.metadata

import pytest

from autoshard.compat.xla import compilers, deviceless
from autoshard.compat.xla.compilers import (
    compiler_options,
    compiler_version,
    compilers_here,
    install_command,
    require_compiler,
)
from autoshard.errors import TargetError

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
REQUIRES = [
    "jaxlib<=0.10.2,>=0.10.1",
    'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
    'libtpu==0.0.42.*; extra == "tpu"',
    'jax-cuda12-plugin<=0.10.2,>=0.10.2; extra == "cuda12-local"',
]


@pytest.fixture
def installed(monkeypatch):
    """Sets which packages are found, beside jax 0.10.2."""

    def set_packages(packages=(), requires=REQUIRES):
        versions = {**JAX, **dict(packages)}

        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(compilers.importlib.metadata, "version", version)
        monkeypatch.setattr(compilers.importlib.metadata, "requires", lambda name: requires)

    return set_packages


CUDA = {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}


@pytest.mark.parametrize(
    "platform, packages, expected",
    [
        ("tpu", {"libtpu": "0.0.42.1"}, "libtpu 0.0.42.1"),
        ("cuda", CUDA, "jax-cuda12-plugin 0.10.2"),
        (
            "cuda",
            {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
            "jax-cuda13-plugin 0.10.2",
        ),
    ],
)
def test_a_compiler_that_fits_is_named_with_its_version(installed, platform, packages, expected):
    installed(packages)
    assert compiler_version(platform) == expected
    assert require_compiler(platform) == expected


def test_of_two_cuda_plugins_the_one_that_fits_is_taken(installed):
    cuda13 = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
    installed({"jax-cuda12-plugin": "0.9.0", "jax-cuda12-pjrt": "0.9.0", **cuda13})
    assert require_compiler("cuda") == "jax-cuda13-plugin 0.10.2"


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_missing_compiler_is_none_and_required_names_the_command(installed, platform):
    installed()
    assert compiler_version(platform) is None
    with pytest.raises(
        TargetError, match=rf"not installed .*pip install 'autoshard\[{platform}\]'"
    ):
        require_compiler(platform)


@pytest.mark.parametrize(
    "platform, packages, words",
    [
        ("tpu", {"libtpu": "0.0.41"}, ["libtpu 0.0.41", "libtpu==0.0.42.*"]),
        ("tpu", {"libtpu": "0.0.421"}, ["libtpu 0.0.421"]),
        ("cuda", {**CUDA, "jax-cuda12-pjrt": "0.10.1"}, ["jax-cuda12-pjrt 0.10.1", "==0.10.2"]),
        ("cuda", {**CUDA, "jax-cuda12-plugin": "0.9.2"}, ["jax-cuda12-plugin 0.9.2", "==0.10.2"]),
        ("cuda", {"jax-cuda12-plugin": "0.10.2"}, ["no jax-cuda12-pjrt"]),
    ],
)
def test_a_compiler_of_another_version_is_refused_with_both_versions(
    installed, platform, packages, words
):
    installed(packages)
    assert compiler_version(platform) is not None, "it is there, if of no use"
    with pytest.raises(TargetError) as caught:
        require_compiler(platform)
    for word in [*words, "jax 0.10.2", install_command(platform)]:
        assert word in str(caught.value)


def test_where_jax_states_no_version_any_is_taken(installed):
    installed({"libtpu": "7.7"}, requires=None)
    assert require_compiler("tpu") == "libtpu 7.7"


@pytest.mark.parametrize("call", [compiler_version, require_compiler, install_command])
def test_other_platforms_are_refused(call):
    with pytest.raises(TargetError, match=r"'rocm'.*expected 'tpu' or 'cuda'"):
        call("rocm")


def test_the_installed_jax_states_which_libtpu_it_needs():
    # The message of a mismatch depends on it: jax may one day write it in another way.
    assert compilers._requirement_of_jax("libtpu", extra="tpu").startswith("==")


@pytest.mark.parametrize(
    "version, specifier, expected",
    [
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.43", "==0.0.42.*", False),
        ("1.2", "==1.2.0", True),
        ("1.2.1", "==1.2.0", False),
        ("0.10.2", "<=0.10.2,>=0.10.2", True),
        ("0.10.10", "<=0.10.2,>=0.10.2", False),
        ("0.9", ">=0.10", False),
        ("2.0", "<2.0", False),
        ("1.9", ">1.8,<2.0", True),
        ("1.2", "!=1.2", False),
        ("1.4.5", "~=1.4.2", True),
        ("1.5", "~=1.4.2", False),
        ("3", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, specifier, expected):
    assert compilers._fits(version, specifier) is expected


@pytest.fixture
def given(monkeypatch):
    """Sets XLA_FLAGS and LIBTPU_INIT_ARGS."""

    def set_options(xla=None, libtpu=None):
        for name, text in (("XLA_FLAGS", xla), ("LIBTPU_INIT_ARGS", libtpu)):
            if text is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, text)

    return set_options


@pytest.mark.parametrize("empty", [None, "", "  ", "--xla_force_host_platform_device_count=8"])
def test_without_options_a_compiler_is_its_version_alone(installed, given, empty):
    installed({"libtpu": "0.0.42.1"})
    given(empty, None if empty is None else "")
    assert compilers_here(None) == "jaxlib 0.10.2"
    assert compilers_here("tpu") == "jaxlib 0.10.2, libtpu 0.0.42.1"


def test_options_are_told_in_an_order_of_their_own_and_the_last_of_a_name_counts(given):
    given("--xla_b=2 --xla_a", "--libtpu_x=1")
    assert compiler_options("cpu") == "--xla_a --xla_b=2"
    assert compiler_options("tpu", deviceless=True) == "--xla_a --xla_b=2 --libtpu_x=1"
    given("--xla_b=1 --xla_a --xla_b=2")
    assert compiler_options("cpu") == "--xla_a --xla_b=2"


def test_what_is_set_for_every_compiler_without_devices_is_no_option(given):
    """A process that was started for one has it in its environment."""
    given(deviceless.environment({})["XLA_FLAGS"])
    assert compiler_options("cuda", deviceless=True) == ""
    assert compiler_options("cuda") == "--xla_gpu_autotune_level=0"


def test_compilers_with_other_options_are_others(installed, given):
    installed({"libtpu": "0.0.42.1"})
    given("--xla_a=1", "--libtpu_x=1")
    assert compilers_here(None) == "jaxlib 0.10.2 with --xla_a=1"
    assert compilers_here("tpu") == "jaxlib 0.10.2, libtpu 0.0.42.1 with --xla_a=1 --libtpu_x=1"
