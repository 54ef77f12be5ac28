"""What methods of one family can do, from which each of them says where it differs (training/methods.py)."""

from dataclasses import replace

from piecework.training.capabilities import Capabilities

FEDAVG = Capabilities(attack="optional", late=True, pages=True, private=True)
FEDEPTH = Capabilities(cuts=True, single_atoms=True, late=True, norms="measured", private=True)
FEDPROPHET = Capabilities(
    attack="always",
    cuts=True,
    stages=True,
    measures=False,
    swaps_with="fedprophet",
    why_not_private="clients tell how far attacks move their features and how they validate, and the model depends on both",
)
HETEROFL = Capabilities(attack="optional", adapts=True, evaluates="as trained", norms="static", private=True)
# Where clients train sub-models, or blocks after others that are random or have just been trained, the statistics kept in
# training are not those of the evaluated model. With FedDF they cost 2 points of accuracy (docs/howto/batch-norm.md).
NARROW = replace(HETEROFL, norms="measured")
LOW_RANK = replace(NARROW, rotates=True, zeroed=True, evaluates="whole", other_norms=False)
FEDDF = Capabilities(
    attack="optional",
    adapts=True,
    untrained="distilled",
    norms="measured",
    public=True,
    pages=True,
    why_not_private="its server learns from the logits of each client's model, and not from their mean alone",
    caveat="small devices train other models; needs public data",
)
SPAFL = Capabilities(
    measures=False,
    evaluates="as trained",
    personal=True,
    other_norms=False,
    lacks={"recompute": "its layers count what they execute, and a second forward pass would count twice"},
    why_not_private="clients send thresholds and report their masks, and the model stays with them",
    caveat="every client has its own model",
)
