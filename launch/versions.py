"""`sao --version`: what is installed, by the packages' metadata. Imports none of them."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = {  # as a person calls them: names of the distributions that have them
    "megatron-sao": ("megatron-sao",),
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "sglang": ("sglang",),
    "transformer-engine": ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13"),
}


def versions() -> str:
    """One line a package.

    >>> versions().splitlines()[0]
    'megatron-sao 0.1.0'
    """
    return "\n".join(
        f"{name} {_installed(distributions) or 'not installed'}" for name, distributions in PACKAGES.items()
    )


def _installed(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
