//! The kernel's verifier accepts the root programs and every graft.
#![allow(missing_docs, non_snake_case)]

use vtl_bpf::{
    check::{check, check_others},
    cost, objects,
    plane::DataPlane,
    rings::RingMaker,
};

#[test]
fn load__root_and_every_graft() {
    if !vtl_testing::is_root() {
        return;
    }
    let mut plane = DataPlane::load().unwrap();
    for (name, image) in objects::GRAFTS {
        let (info, steps) = plane.deploy_timed(image).unwrap();
        println!("{name}: {} instructions, {steps:?}", info.instructions);
        assert!(info.instructions > 0);
        // All of them, in the source's order, whoever loaded them.
        assert_eq!(steps.programs.len(), 7, "{steps:?}");
        assert_eq!(steps.programs[0].0, "vtl_egress_xdp");
        assert!(steps.programs.iter().all(|(_, took)| !took.is_zero()));
    }
    assert_eq!(plane.grafts().count(), objects::GRAFTS.len());
    let mut maker = RingMaker::new(&plane).unwrap();
    let sets = maker.make(&[256, 64, 1024]).unwrap();
    let made: Vec<_> = sets.iter().map(|s| (s.index, s.slots)).collect();
    assert_eq!(made, [(0, 256), (1, 64), (2, 1024)]);
    maker.retire(sets).unwrap();
    assert!(maker.make(&[64]).unwrap()[0].index < 3, "used again");
    plane.remove("stream").unwrap();
    assert!(plane.remove("stream").is_err());
}

#[test]
fn load__without_xdp_leaves_its_programs_out() {
    if !vtl_testing::is_root() {
        return;
    }
    let mut plane = DataPlane::load_for(0, 1, true, false).unwrap();
    let stream = objects::graft("stream").unwrap();
    let (_, steps) = plane.deploy_timed(stream).unwrap();
    let loaded: Vec<&str> = steps.programs.iter().map(|(name, _)| &**name).collect();
    let by_tc = [
        "vtl_egress_tc",
        "vtl_egress_direct",
        "vtl_ingress_tc",
        "vtl_listener_tc",
    ];
    assert_eq!(loaded[0], "vtl_egress_xdp");
    assert_eq!(loaded[1..], by_tc);
    // Again, in the place of the first.
    assert_eq!(plane.deploy(stream).unwrap().name, "stream");
    plane.remove("stream").unwrap();
}

#[test]
fn cost__of_every_graft() {
    if !vtl_testing::is_root() {
        return;
    }
    for (name, image) in objects::GRAFTS {
        let costs = cost::measure(image).unwrap();
        println!("{name}: {costs:?}");
        // Half a microsecond as a rule; here only that something was measured.
        for ns in [costs.egress_ns, costs.ingress_ns] {
            assert!((1.0..1e6).contains(&ns), "{name}: {costs:?}");
        }
        assert!(costs.listener_ns.is_some(), "{name}: {costs:?}");
    }
    assert!(cost::measure(b"").is_err());
}

/// Instructions that the verifier may look at for one program of a graft: what deploying one takes
/// is nearly all the verifier's time.
const PROCESSED: u64 = 22_000;

#[test]
fn check__every_graft_is_verified_fast() {
    if !vtl_testing::is_root() {
        return;
    }
    let plane = DataPlane::load().unwrap();
    let mut slow = Vec::new();
    for (name, image) in objects::GRAFTS {
        for v in check(plane.loader(), image).unwrap() {
            let figures = format!("{name} {}: {} processed", v.program, v.processed);
            println!("{figures} of {} instructions, {:?}", v.instructions, v.took);
            if !v.accepted {
                println!("{}", &v.log[v.log.len().saturating_sub(2000)..]);
            }
            if !v.accepted || !(v.instructions as u64..PROCESSED).contains(&v.processed) {
                slow.push(figures);
            }
        }
    }
    assert!(slow.is_empty(), "{slow:#?}");
    assert_eq!(plane.grafts().count(), 0);
}

#[test]
fn check__what_vtld_loads_besides_grafts() {
    if !vtl_testing::is_root() {
        return;
    }
    let mut refused = Vec::new();
    for v in check_others().unwrap() {
        println!(
            "{}: {} processed of {} instructions",
            v.program, v.processed, v.instructions
        );
        if !v.accepted {
            println!("{}", &v.log[v.log.len().saturating_sub(2000)..]);
            refused.push(v.program);
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
}
