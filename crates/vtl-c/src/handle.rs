//! Handles: what C holds in place of objects. They are numbers that look like pointers, so that one
//! which is wrong, or which has been closed, is found out instead of followed.

use std::sync::{Arc, PoisonError, RwLock};

use crate::abi::vtl_socket;

/// Bits of a handle that say which place of the table; those above count how often it was used.
const PLACE_BITS: u32 = 20;
/// No object of C lies at an odd address.
const MARK: usize = 1;

struct Place<T> {
    uses: usize,
    object: Option<Arc<T>>,
}

/// Objects by handle.
pub(crate) struct Table<T>(RwLock<Places<T>>);

struct Places<T> {
    all: Vec<Place<T>>,
    free: Vec<usize>,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new(Places {
            all: Vec::new(),
            free: Vec::new(),
        }))
    }

    /// A handle for an object; `None` if there are too many.
    pub(crate) fn insert(&self, object: T) -> Option<*mut vtl_socket> {
        let mut places = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let at = match places.free.pop() {
            Some(at) => at,
            None if places.all.len() >> PLACE_BITS != 0 => return None,
            None => {
                places.all.push(Place {
                    uses: 0,
                    object: None,
                });
                places.all.len() - 1
            }
        };
        let place = &mut places.all[at];
        place.uses = place.uses.wrapping_add(1) & (usize::MAX >> (PLACE_BITS + 1));
        place.object = Some(Arc::new(object));
        let handle = (place.uses << PLACE_BITS | at) << 1 | MARK;
        Some(std::ptr::without_provenance_mut(handle))
    }

    /// The object of a handle, if it is still there.
    pub(crate) fn get(&self, handle: *const vtl_socket) -> Option<Arc<T>> {
        let places = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (at, uses) = parse(handle)?;
        let place = places.all.get(at).filter(|place| place.uses == uses)?;
        place.object.clone()
    }

    /// Ends a handle. Who is using the object keeps it as long.
    pub(crate) fn remove(&self, handle: *const vtl_socket) -> Option<Arc<T>> {
        let mut places = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let (at, uses) = parse(handle)?;
        let place = places.all.get_mut(at).filter(|place| place.uses == uses)?;
        let object = place.object.take()?;
        places.free.push(at);
        Some(object)
    }
}

fn parse(handle: *const vtl_socket) -> Option<(usize, usize)> {
    let handle = handle.addr();
    let at = handle >> 1 & ((1 << PLACE_BITS) - 1);
    (handle & MARK != 0).then_some((at, handle >> (PLACE_BITS + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table__finds_what_was_put_in_until_it_is_removed() {
        let table = Table::new();
        let [a, b] = [1, 2].map(|n| table.insert(n).unwrap());
        assert_eq!((*table.get(a).unwrap(), *table.get(b).unwrap()), (1, 2));
        assert_eq!(*table.remove(a).unwrap(), 1);
        assert!(table.get(a).is_none() && table.remove(a).is_none());
        assert_eq!(*table.get(b).unwrap(), 2);
    }

    #[test]
    fn table__a_place_used_again_does_not_answer_to_the_old_handle() {
        let table = Table::new();
        let old = table.insert(1).unwrap();
        table.remove(old);
        let new = table.insert(2).unwrap();
        assert_ne!(old, new);
        assert!(table.get(old).is_none());
        assert_eq!(*table.get(new).unwrap(), 2);
    }

    #[test]
    fn table__pointers_that_are_no_handles_are_not_found() {
        let table = Table::new();
        table.insert(1).unwrap();
        let local = 0;
        for wrong in [
            std::ptr::null(),
            (&raw const local).cast(),
            std::ptr::without_provenance(1),
            std::ptr::without_provenance(usize::MAX),
        ] {
            assert!(table.get(wrong).is_none(), "{wrong:?}");
        }
    }
}
