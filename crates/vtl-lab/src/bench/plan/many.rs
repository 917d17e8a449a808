//! Keys of plans that may have several values.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer, SeqAccess, Visitor};

/// One value or a list of them; a list multiplies the cells.
#[derive(Clone, Debug)]
pub(super) enum Many<T> {
    /// A value.
    One(T),
    /// A list.
    List(Vec<T>),
}

/// By hand rather than as an untagged enum, whose errors do not say what was expected.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrList(PhantomData))
    }
}

struct OneOrList<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrList<T> {
    type Value = Many<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or a list of values")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Many<T>, E> {
        T::deserialize(value.into_deserializer()).map(Many::One)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Many<T>, E> {
        T::deserialize(value.into_deserializer()).map(Many::One)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Many<T>, E> {
        T::deserialize(value.into_deserializer()).map(Many::One)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Many<T>, E> {
        T::deserialize(value.into_deserializer()).map(Many::One)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, values: A) -> Result<Many<T>, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(values)).map(Many::List)
    }
}

impl<T: Clone> Many<T> {
    pub(super) fn list(&self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value.clone()],
            Self::List(values) => values.clone(),
        }
    }
}

/// The values of a key that may be absent: then one absent value.
pub(super) fn choices<T: Clone>(many: Option<&Many<T>>) -> Vec<Option<T>> {
    many.map_or_else(
        || vec![None],
        |many| many.list().into_iter().map(Some).collect(),
    )
}
