"""Models of other libraries with random weights: tiny ones that are compared with the plain loop, larger ones timed."""

from . import adapters, audio, diffusion, graphs, language, multimodal, sequence, vision
from .imports import make_torchvision_importable
from .subject import Subject

__all__ = ["SUBJECTS", "Subject"]

SUBJECTS: tuple[Subject, ...] = (
    *language.SUBJECTS, *sequence.SUBJECTS, *adapters.SUBJECTS, *multimodal.SUBJECTS, *audio.SUBJECTS,
    *vision.SUBJECTS, *diffusion.SUBJECTS, *graphs.SUBJECTS,
)  # fmt: skip

make_torchvision_importable()
