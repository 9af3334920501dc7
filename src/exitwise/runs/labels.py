"""Labels of models for people: not every network is an MSDNet. Keys in files and in JSON are the methods' names."""

from collections.abc import Mapping

from exitwise import models
from exitwise.calibration.methods import VANILLA
from exitwise.evaluation.paper_tables import DECISIONS

PLAIN = "plain"


def is_msdnet(preset: str | None) -> bool:
    """Return whether a preset is an MSDNet, as the paper's networks are."""
    return preset in models.list_presets() and models.family(str(preset)).name == "MSDNet"


def model_labels(preset: str | None) -> Mapping[str, str]:
    """Return labels by method, for a net of this preset or of the user (None); other methods keep their names."""
    if is_msdnet(preset):
        return {}
    return {VANILLA: PLAIN, DECISIONS: "Plain predictions, our model decisions"}
