//! Registering VTL's TCP congestion controls with the kernel, and unregistering them.
#![allow(missing_docs, non_snake_case)]

use vtl_bpf::tcp::{self, Control};

fn is_listed(name: &str) -> bool {
    tcp::of_kernel().iter().any(|known| known == name)
}

#[test]
fn register__each_and_each_twice() {
    if !vtl_testing::is_root() {
        return;
    }
    for name in tcp::names() {
        let first = Control::register(name).unwrap();
        let second = Control::register(name).unwrap();
        assert!(first.name().starts_with(&format!("{}{name}", tcp::PREFIX)));
        assert_ne!(first.name(), second.name());
        for control in [first, second] {
            let kernel_name = control.name().to_owned();
            assert!(is_listed(&kernel_name), "{kernel_name}");
            drop(control);
            // The last reference goes after a grace period.
            vtl_testing::until("the kernel has unregistered it", || {
                !is_listed(&kernel_name)
            });
        }
    }
    let error = Control::register("hybla2").unwrap_err().to_string();
    assert!(error.contains("no tcp:hybla2"), "{error}");
}
