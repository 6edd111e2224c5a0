"""The experiment of `study.py` that compares the losses."""

from study_experiments import THIRD_PARTY, Experiment, Finding, Setting

AP_LOSSES = ("SmoothAPLoss", "FastAPLoss", "QuantizedAPLoss", "BlackboxAPLoss", "SupAPLoss", "ROADMAPLoss")
RECALL_LOSSES = ("BlackboxRecallLoss", "RecallAtKLoss")

LOSS_EXPERIMENTS = {
    "losses": Experiment(
        "Losses side by side",
        "Each loss has its paper's parameters, and the baselines have the defaults of pytorch-metric-learning. The "
        "learning rate was not tuned for any of them.",
        {
            "": {
                **{name: Setting(loss=name) for name in (*AP_LOSSES, *RECALL_LOSSES, *THIRD_PARTY)},
                "untrained": Setting(images=0),
            }
        },
        [
            Finding(
                "FastAP is above contrastive (SOP, R@1 76.4 and 42.0 in RaMBO's Table 2, with other networks)",
                "FastAPLoss",
                "ContrastiveLoss",
            ),
            Finding(
                "FastAP is above triplets (SOP, R@1 76.4 and 42.1 in RaMBO's Table 2, with other networks)",
                "FastAPLoss",
                "TripletMarginLoss",
            ),
            Finding(
                "RaMBO's recall is above FastAP (SOP, R@1 77.8 with log and 76.4 in RaMBO's Table 2)",
                "BlackboxRecallLoss",
                "FastAPLoss",
                metric="R@1",
            ),
            Finding("Smooth-AP is above FastAP (SOP, R@1 80.1 and 76.4)", "SmoothAPLoss", "FastAPLoss"),
            Finding(
                "Smooth-AP is above RaMBO's recall (SOP, R@1 80.1 and 77.8 with log)",
                "SmoothAPLoss",
                "BlackboxRecallLoss",
                metric="R@1",
            ),
            Finding("ROADMAP is above earlier forms of AP (abstract)", "ROADMAPLoss", "SmoothAPLoss"),
            Finding("SupAP alone is above Smooth-AP (ROADMAP*)", "SupAPLoss", "SmoothAPLoss"),
            Finding("Recall@k is above Smooth-AP (Patel et al.*)", "RecallAtKLoss", "SmoothAPLoss", metric="R@1"),
        ],
    ),
}
