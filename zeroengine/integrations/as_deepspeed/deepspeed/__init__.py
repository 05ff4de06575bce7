"""zeroengine under the name `deepspeed`: exchanges itself for the stand-in."""

from zeroengine.integrations.standin.finder import install

__zeroengine__ = True  # standin.finder.MARK: this is not the real package
install()
