"""Models of other libraries, tiny and with random weights, on which clipping is compared with the plain loop."""

from . import adapters, language, sequence, vision
from .imports import make_torchvision_importable
from .subject import Subject

__all__ = ["SUBJECTS", "Subject"]

SUBJECTS: tuple[Subject, ...] = (*language.SUBJECTS, *sequence.SUBJECTS, *adapters.SUBJECTS, *vision.SUBJECTS)

make_torchvision_importable()
