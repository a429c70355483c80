"""The two kinds of stage, as LightningModules."""

from parallel_r1.modules.responder import Generation
from parallel_r1.modules.rl import RLModule
from parallel_r1.modules.sft import SFTModule

__all__ = ["Generation", "RLModule", "SFTModule"]
