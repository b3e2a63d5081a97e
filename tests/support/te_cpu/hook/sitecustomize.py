"""Python runs this at start where this folder is on PYTHONPATH: the stand-in is then there in every process."""

from tests.support.te_cpu.install import watch_imports

watch_imports()
