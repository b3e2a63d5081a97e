"""The commands of a publish, given to this rank's sender."""

from dataclasses import asdict

from megatron_sao.channel import (
    Answer,
    PublishCommand,
    PublishJoin,
    PublishLeave,
    PublishListen,
    PublishPlanning,
    PublishPrepare,
    PublishSend,
    publish_plan_data,
)
from megatron_sao.sync.group import Cancelled
from megatron_sao.sync.send import WeightSender


def execute(command: PublishCommand, sender: WeightSender, cancelled: Cancelled) -> Answer:
    """Run `command` on this rank. `cancelled` is polled while the sender waits for engines."""
    match command:
        case PublishPlanning(full=full, bucket_bytes=bucket_bytes, direct=direct):
            return Answer(data=publish_plan_data(sender.plan(full=full, bucket_bytes=bucket_bytes, direct=direct)))
        case PublishListen():
            endpoint = sender.listen()
            return Answer(data=asdict(endpoint) if endpoint else {})
        case PublishJoin(groups=groups, world_size=world_size, address=address, port=port, timeout_s=timeout_s):
            sender.join(groups, world_size, timeout_s, endpoint=(address, port), cancelled=cancelled)
        case PublishPrepare(bucket=bucket, timeout_s=timeout_s):
            sender.prepare(bucket, timeout_s)
        case PublishSend(bucket=bucket, timeout_s=timeout_s):
            report = sender.send(bucket, timeout_s, cancelled)
            return Answer(data=asdict(report) if report else {})
        case PublishLeave():
            sender.leave()
        case _:
            raise AssertionError(f"{command.name} is a publish command without a place here")
    return Answer()
