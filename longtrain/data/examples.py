"""tf.train.Example, the record that ArrayRecord files mostly hold, read without TensorFlow.

Its wire format is public: message Example { Features features = 1; }, Features { map<string, Feature> feature = 1; },
Feature { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }, each list { repeated value = 1; }
(tensorflow/core/example/{example,feature}.proto).
"""

from functools import cache
from typing import Any

import numpy as np

Example = dict[str, Any]
"""Feature -> its values: a list of bytes, or an array of floats or whole numbers."""


def parse(record: bytes) -> Example | None:
    """The features of a record, or None where it is not an Example with any."""
    from google.protobuf.message import DecodeError

    message = _message()()
    try:
        message.ParseFromString(record)
    except DecodeError:
        return None
    features = message.features.feature
    return {name: _values(feature) for name, feature in features.items()} or None


def _values(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "bytes_list":
        return list(feature.bytes_list.value)
    if kind is None:
        return np.zeros(0, np.int64)
    return np.array(getattr(feature, kind).value, np.int64 if kind == "int64_list" else np.float32)


@cache
def _message() -> Any:
    """The class of an Example, made from its description, as no library of ours ships it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="longtrain/example.proto", package="longtrain", syntax="proto3")

    def add(scope: Any, name: str, kind: int = 0, *, of: str = "", number: int = 1, many: bool = False) -> None:
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        of_type = {"type": field.TYPE_MESSAGE, "type_name": f".longtrain.{of}"} if of else {"type": kind}
        scope.field.add(name=name, number=number, label=label, **of_type)

    lists = (("Bytes", field.TYPE_BYTES), ("Float", field.TYPE_FLOAT), ("Int64", field.TYPE_INT64))
    feature = descriptor_pb2.DescriptorProto(name="Feature", oneof_decl=[{"name": "kind"}])
    for number, (name, kind) in enumerate(lists, start=1):
        add(file.message_type.add(name=f"{name}List"), "value", kind, many=True)
        add(feature, f"{name.lower()}_list", of=f"{name}List", number=number)
        feature.field[-1].oneof_index = 0
    file.message_type.append(feature)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options={"map_entry": True})
    add(entry, "key", field.TYPE_STRING)
    add(entry, "value", of="Feature", number=2)
    add(features, "feature", of="Features.FeatureEntry", many=True)
    add(file.message_type.add(name="Example"), "features", of="Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("longtrain.Example"))
