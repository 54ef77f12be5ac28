"""The words below the pictures of the systems' cards: what the numbers in front of the rows are, and the idea."""

IN_TURN = "1, 2, ..: steps of one round, one after another."
STAGES = "1, 2, ..: stages of the run, each of many rounds."
ROUNDS = "1, 2, ..: rounds."
NUMBERS = {
    **dict.fromkeys(["fedepth", "m-fedepth"], IN_TURN),
    **dict.fromkeys(["fedprophet", "profl"], STAGES),
    "slt": "P: pretraining; 1, 2, ..: steps of the run, each of many rounds.",
    **dict.fromkeys(["feddrop", "prism", "splitmix", "cocofl"], ROUNDS),
    "fedrolex": "1, 4, 7: rounds.",
}
PARTS = {"prism": "kernels", "orthdrop": "kernels", "splitmix": "nets"}  # of which a box is filled
MEAN = "The server averages each entry over the boards that trained it."
CAPTIONS = {
    "allsmall": "One model, so narrow that the smallest board can train it; the larger boards train the same one.",
    "cocofl": "Each board draws a run of layers that fits, anew in each round, and sends back only these layers.",
    "depthfl": "Each board trains as many blocks as fit, with a classifier after each. " + MEAN,
    "exclusivefl": "Only boards that can hold a step of the whole model take part.",
    "fedavg": "Every board trains the whole model, or refuses. The server averages the weights by examples.",
    "feddf": "Each board trains the largest architecture that fits. The server averages within an architecture, and then lets "
    "each learn from the mean of all clients' logits on public data.",
    "feddrop": "Each board trains random channels, drawn anew for every board and round. " + MEAN,
    "fedepth": "Each board cuts the model into blocks that fit, and trains them one after another, each with the same head. "
    + MEAN,
    "fedet": "Each board trains the largest architecture that fits. The server's large model learns from their votes on public "
    "data; all share the last layer.",
    "fedpm": "Weights stay random. A board trains a score for each, and sends one bit for each: keep, or not.",
    "fedprophet": "In stage n all boards train module n; a fast board with more memory also trains the next ones.",
    "fedprox": "FedAvg with a pull towards the weights that the board got, of which a step holds a copy.",
    "fedrbn": "Boards with memory for it train on attacked examples, the others on clean ones, and get the attacked examples' "
    "norm statistics from the former. Beyond its memory a board swaps (simulated).",
    "fedrolex": "Each board trains a window of channels, which moves on by one channel a round. " + MEAN,
    "fjord": "Each board trains nested nets of the first channels: each batch draws one of the widths up to its own. "
    + MEAN,
    "heterofl": "Each board trains the first channels of every layer, as many as fit. " + MEAN,
    "jfat": "Every board trains the whole model on attacked examples. Beyond its memory it swaps (simulated): that takes time.",
    "local": "SpaFL's model without any exchange: every board trains its own masked model.",
    "m-fedepth": "FeDepth with a head of its own after every part of the model, in place of one for all. " + MEAN,
    "origdrop": "Each board trains the first channels of every layer. The served model is the largest that any board trains.",
    "orthdrop": "A weight is a sum of kernels. Each board trains those with the largest singular values, always the same.",
    "prism": "A weight is a sum of kernels. Each board trains some that are drawn anew in each round, large ones more often.",
    "profl": "In stage n the boards with memory for it train block n; small layers stand in for the blocks behind it. "
    "This is growing; shrinking goes the other way before.",
    "slt": "In step n layer n is trained in full width, and narrow layers behind it that fit the smallest board. Larger boards "
    "go on training earlier layers.",
    "spafl": "Every board keeps its own weights, and sends only the thresholds below which filters are pruned.",
    "splitmix": "The model is eight narrow nets. Each board trains as many as fit, others in each round; all predict together.",
}
