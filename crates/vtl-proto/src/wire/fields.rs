//! Reading and writing the fields of C structs in byte slices, big-endian.

/// An unsigned field.
pub(crate) trait Int: Copy {
    fn load(bytes: &[u8]) -> Self;
    fn store(self, bytes: &mut [u8]);
}

macro_rules! int {
    ($($int:ty)*) => {$(
        impl Int for $int {
            fn load(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<Self>()];
                array.copy_from_slice(&bytes[..size_of::<Self>()]);
                Self::from_be_bytes(array)
            }

            fn store(self, bytes: &mut [u8]) {
                bytes[..size_of::<Self>()].copy_from_slice(&self.to_be_bytes());
            }
        }
    )*};
}

int!(u8 u16 u32 u64);

/// The third argument only ties the width that is read to the struct's field.
pub(crate) fn load<S, T: Int>(bytes: &[u8], offset: usize, _: fn(&S) -> T) -> T {
    T::load(&bytes[offset..])
}

/// As [`load`].
pub(crate) fn store<S, T: Int>(bytes: &mut [u8], offset: usize, _: fn(&S) -> T, value: T) {
    value.store(&mut bytes[offset..]);
}

/// `get!(bytes, struct, field)`: the field, from bytes that are at least as long as the struct.
macro_rules! get {
    ($bytes:expr, $struct:ident, $field:ident) => {
        $crate::wire::fields::load(
            $bytes,
            core::mem::offset_of!($crate::intf::$struct, $field),
            |s: &$crate::intf::$struct| s.$field,
        )
    };
}

/// `put!(bytes, struct, field, value)`.
macro_rules! put {
    ($bytes:expr, $struct:ident, $field:ident, $value:expr) => {
        $crate::wire::fields::store(
            $bytes,
            core::mem::offset_of!($crate::intf::$struct, $field),
            |s: &$crate::intf::$struct| s.$field,
            $value,
        )
    };
}

/// Bytes of a field that a closure reads.
#[doc(hidden)]
#[must_use]
pub const fn size_of_field<S, T>(_: fn(&S) -> T) -> usize {
    size_of::<T>()
}

/// `field!(struct, field)`: the field's bytes in a VTL header, as a range; for what damages packets, or reads damaged
/// ones.
///
/// ```
/// assert_eq!(vtl_proto::field!(vtl_hdr, len).len(), 2);
/// ```
#[macro_export]
macro_rules! field {
    ($struct:ident, $field:ident) => {{
        const AT: usize = core::mem::offset_of!($crate::intf::$struct, $field);
        const SIZE: usize = $crate::wire::size_of_field(|s: &$crate::intf::$struct| s.$field);
        AT..AT + SIZE
    }};
}

pub(crate) use {get, put};
