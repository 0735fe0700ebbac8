"""Lightning 2.x: a callback that makes a Trainer's fit private, and the same for a loop with Fabric.

A batch of the Trainer is a logical batch of the engine, so that one step of the engine is one ``global_step``.
"""

from ghostclip.integrations import missing

try:
    from ghostclip.integrations.lightning.callback import PrivacyCallback
    from ghostclip.integrations.lightning.fabric import setup_fabric
except ModuleNotFoundError as error:
    raise missing(error, "lightning") from None

__all__ = ["PrivacyCallback", "setup_fabric"]
