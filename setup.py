"""Compiles the kernels for packed weights at installation, if there is a C compiler; all else is in setup.cfg.

Without one, or where it fails, the installation succeeds nevertheless: the kernels are then compiled at first use, or
torch computes. With OPTIMUM_NEURONAL_PURE=1 nothing is compiled: `make dist` makes one wheel for all platforms so.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


PURE = os.environ.get("OPTIMUM_NEURONAL_PURE") == "1"
PACKAGE = Path("optimum_neuronal", "native")
# By its path: importing the package would import torch, which need not be there yet.
_spec = importlib.util.spec_from_file_location("neuronal_build", Path(__file__).parent / PACKAGE / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


class BuildKernels(build_ext):
    """A library that ctypes loads, named after its source; no module of Python's."""

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_library(target)
        except (build.BuildError, OSError) as error:
            self.warn(f"the kernels for packed weights are not compiled: {error}. They will be at first use.")

    def get_ext_filename(self, fullname):
        return build.installed_library().name

    def copy_extensions_to_source(self):  # of an editable installation
        for extension in self.extensions:
            built = Path(self.build_lib, PACKAGE, self.get_ext_filename(extension.name))
            if built.exists():
                self.copy_file(str(built), str(build.installed_library()))

    def get_outputs(self):
        return [output for output in super().get_outputs() if Path(output).exists()]


class Wheel(bdist_wheel):
    """A wheel for any Python: nothing in it knows Python's own libraries. With kernels it is for this platform alone."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[] if PURE else [Extension("optimum_neuronal.native.kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
