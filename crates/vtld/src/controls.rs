//! VTL's own TCP congestion controls: each is registered with the kernel when it is first asked for, once for hooks, rules and
//! flows, until the daemon ends.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use vtl_bpf::tcp::Control;

static REGISTERED: Mutex<BTreeMap<String, Control>> = Mutex::new(BTreeMap::new());

/// Registers one of [`vtl_bpf::tcp::names`], unless that is done, which takes as long as the kernel's verifier. Returns the
/// kernel's name of it.
///
/// # Errors
/// See [`Control::register`].
pub(crate) fn register(name: &str) -> Result<String, vtl_bpf::Error> {
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(control) = registered.get(name) {
        return Ok(control.name().to_owned());
    }
    let control = Control::register(name)?;
    let known = control.name().to_owned();
    registered.insert(name.to_owned(), control);
    Ok(known)
}
