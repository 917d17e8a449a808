//! Grafts: their size, compiling, and each step of a deployment, by the code that vtld deploys with.

use std::time::{Duration, Instant};

use vtl_bpf::load::Steps;
use vtl_bpf::objects;
use vtl_bpf::plane::DataPlane;
use vtl_pool::key::{SecretKey, Trust};
use vtl_pool::manifest::Project;
use vtl_pool::object::Description;
use vtl_pool::{Package, Version};

use super::{Order, Report, lines, ms};
use crate::interrupt::Interrupt;

/// Compiling is the same each time, and takes long.
const MAX_COMPILATIONS: u32 = 3;

/// A graft that comes with VTL: its name and object.
pub(super) type Graft = (&'static str, &'static [u8]);

/// The grafts of these names, or all.
pub(super) fn chosen(names: &[String]) -> anyhow::Result<Vec<Graft>> {
    if names.is_empty() {
        return Ok(objects::GRAFTS.to_vec());
    }
    let find = |name: &String| {
        let known = objects::GRAFTS.iter().find(|(known, _)| known == name);
        known
            .copied()
            .ok_or_else(|| anyhow::anyhow!("no graft \"{name}\" comes with VTL"))
    };
    names.iter().map(find).collect()
}

pub(super) fn run(
    order: &Order<'_>,
    grafts: &[Graft],
    interrupt: &Interrupt,
    say: &mut dyn FnMut(&str),
    report: &mut Report,
) -> anyhow::Result<()> {
    let sources = order.sources.join("grafts");
    let sourced = sources.is_dir();
    if !sourced {
        report.missing.push(format!(
            "lines and compile time: {} is no directory of VTL's sources (--sources names it)",
            order.sources.display()
        ));
    } else if let Err(why) = &order.compiler {
        report.missing.push(format!("compile time: {why}"));
    }
    vtl_bpf::silence();
    // As vtld without `--ingress xdp`.
    let mut plane = DataPlane::load_for(0, 1, true, false)?;
    let mut loads = Vec::new();
    for (name, image) in grafts {
        interrupt.check()?;
        say(&format!("graft {name}"));
        let source = sources.join(format!("{name}.bpf.c"));
        if sourced {
            let found = lines::count(&order.sources, &source)?;
            let mut sheet = report.sheet("graft", "lines");
            sheet.add(*name, "lines", found.graft as f64);
            sheet.add(*name, "and tf", (found.graft + found.functions) as f64);
            let all = found.graft + found.functions + found.rest;
            sheet.add(*name, "and vtl", all as f64);
            let bytes = std::fs::metadata(&source)?.len();
            report
                .sheet("graft", "bytes")
                .add(*name, "source", bytes as f64);
        }
        report
            .sheet("graft", "bytes")
            .add(*name, "object", image.len() as f64);
        if let (true, Ok(compile)) = (sourced, &order.compiler) {
            let object = order.scratch.join("graft.bpf.o");
            let mut times = Vec::new();
            for _ in 0..order.loads.min(MAX_COMPILATIONS) {
                interrupt.check()?;
                let started = Instant::now();
                compile(&source, &object)?;
                times.push(ms(started.elapsed()));
            }
            report
                .sheet("graft", "ms")
                .add_median(*name, "compile ms", times);
        }
        let (times, instructions) = deploy(&mut plane, image, order.loads, interrupt)?;
        let load = times.iter().map(|t| ms(t.steps.total()));
        report
            .sheet("graft", "ms")
            .add_median(*name, "load ms", load);
        report
            .sheet("graft", "instructions")
            .add(*name, "instructions", instructions as f64);
        loads.push((name, times));
    }
    let mut sheet = report.sheet("deployment", "ms");
    for (name, times) in &loads {
        let mut add = |what: &str, step: fn(&Load) -> Duration| {
            sheet.add_median(**name, what, times.iter().map(|t| ms(step(t))));
        };
        add("package", |t| t.package);
        add("open", |t| t.steps.describe + t.steps.open);
        add("prepare", |t| t.steps.prepare);
        add("verify", |t| t.steps.verify);
        add("fill", |t| t.steps.fill);
        add("total", |t| t.package + t.steps.total());
    }
    let mut sheet = report.sheet("program", "ms");
    for (name, times) in &loads {
        for (i, (program, _)) in times[0].steps.programs.iter().enumerate() {
            let all = times.iter().map(|t| ms(t.steps.programs[i].1));
            let short = program.strip_prefix("vtl_").unwrap_or(program);
            sheet.add_median(**name, short, all);
        }
    }
    Ok(())
}

/// One deployment.
struct Load {
    /// Reading the package, its signature and manifest checked.
    package: Duration,
    steps: Steps,
}

/// Deploys a graft from a package time and again; also counts its instructions.
fn deploy(
    plane: &mut DataPlane,
    image: &[u8],
    loads: u32,
    interrupt: &Interrupt,
) -> anyhow::Result<(Vec<Load>, usize)> {
    let description = Description::read(image)?;
    let version = env!("CARGO_PKG_VERSION").parse::<Version>();
    let project = Project::built_in(&description, version.map_err(anyhow::Error::msg)?);
    let key = SecretKey::generate()?;
    let mut trust = Trust::default();
    trust.add("bench", key.public());
    let bytes = Package::sign(&project.manifest(&description)?, image, &key)?;
    let mut times = Vec::new();
    let mut instructions = 0;
    for _ in 0..loads {
        interrupt.check()?;
        let started = Instant::now();
        let (package, _) = Package::open(&bytes, &trust)?;
        let read = started.elapsed();
        let (info, steps) = plane.deploy_timed(&package.object)?;
        instructions = info.instructions;
        times.push(Load {
            package: read,
            steps,
        });
    }
    Ok((times, instructions))
}
