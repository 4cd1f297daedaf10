"""What answers that are judged alone are compared with in an optimizer step."""

from finetune.data.batches import Batch, Batches
from finetune.run.session import Session
from finetune.training.preferences import Preferences


def know_reference_point(learnt: Preferences, session: Session, batch: Batch) -> None:
    """Before the micro-batches of a step; does nothing for losses without a reference point. Collective."""
    batches = session.batches
    assert isinstance(batches, Batches)
    learnt.know_reference_point(
        session.accelerator,
        session.model,
        batches,
        batch.places,
        micro_batch_size=batches.micro_batch_size,
        collate=session.collate,
        share=session.share,
    )
