//! The links of plans.

use vtl_testbed::{BadLink, Link, LossModel, Medium, Profile};

use super::Change;
use super::file::{LONGEST_S, Problem, problem};
use super::many::{Many, choices};

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkTable {
    profile: Option<Many<String>>,
    medium: Option<Many<String>>,
    rtt_ms: Option<Many<f64>>,
    rate_mbit: Option<Many<f64>>,
    queue_packets: Option<u32>,
    loss_pct: Option<Many<f64>>,
    loss_model: Option<Many<String>>,
    reorder_pct: Option<f64>,
    seed: Option<u64>,
    #[serde(default)]
    timeline: Vec<ChangeTable>,
}

#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChangeTable {
    at_s: f64,
    rtt_ms: Option<f64>,
    rate_mbit: Option<f64>,
    queue_packets: Option<u32>,
    loss_pct: Option<f64>,
    loss_model: Option<String>,
    reorder_pct: Option<f64>,
}

/// The link behind a gateway.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CoreTable {
    rtt_ms: Option<f64>,
    rate_mbit: Option<f64>,
}

fn loss_model(name: &str) -> Result<LossModel, Problem> {
    match name {
        "uniform" => Ok(LossModel::Uniform),
        "gilbert-elliott" => Ok(LossModel::BURSTS),
        other => problem(
            "loss_model",
            format!("there is no \"{other}\": valid are \"uniform\", \"gilbert-elliott\""),
        ),
    }
}

/// One link of a plan.
pub(super) struct OneLink {
    /// Where it came from, if it is a named one.
    pub(super) profile: Option<Profile>,
    /// What the plan says of its medium.
    pub(super) medium: Option<Medium>,
    /// The link.
    pub(super) link: Link,
}

/// Every link of the table.
pub(super) fn links(table: &LinkTable) -> Result<Vec<OneLink>, Problem> {
    if table.profile.is_none() && (table.rtt_ms.is_none() || table.rate_mbit.is_none()) {
        return problem("link", "needs `profile`, or `rtt_ms` and `rate_mbit`");
    }
    let mut links = Vec::new();
    for name in choices(table.profile.as_ref()) {
        let profile = name.as_deref().map(profile).transpose()?;
        for name in choices(table.medium.as_ref()) {
            let medium = name.as_deref().map(medium).transpose()?;
            for rate_mbit in choices(table.rate_mbit.as_ref()) {
                for rtt_ms in choices(table.rtt_ms.as_ref()) {
                    let mut link = profile.map_or_else(Link::default, Profile::link);
                    link.rtt_ms = rtt_ms.unwrap_or(link.rtt_ms);
                    link.rate_mbit = rate_mbit.unwrap_or(link.rate_mbit);
                    link = medium.map_or(link.clone(), |medium| medium.over(&link));
                    for link in impaired(table, &link)? {
                        links.push(OneLink {
                            profile,
                            medium,
                            link,
                        });
                    }
                }
            }
        }
    }
    Ok(links)
}

/// The link with every loss of the table.
fn impaired(table: &LinkTable, clean: &Link) -> Result<Vec<Link>, Problem> {
    let mut links = Vec::new();
    for loss in choices(table.loss_pct.as_ref()) {
        for model in choices(table.loss_model.as_ref()) {
            let mut link = clean.clone();
            link.queue_packets = table.queue_packets.or(link.queue_packets);
            link.loss_pct = loss.unwrap_or(link.loss_pct);
            link.reorder_pct = table.reorder_pct.unwrap_or(link.reorder_pct);
            link.seed = table.seed.unwrap_or(link.seed);
            if let Some(model) = model {
                link.loss_model = loss_model(&model)?;
            }
            if let Err(error) = link.check() {
                return problem("link", error.0);
            }
            if link.direct && (link.rtt_ms > 0.0 || link.rate_mbit > 0.0 || link.slots.is_some()) {
                return problem("profile", "`wire` has no delay, no rate and no medium");
            }
            links.push(link);
        }
    }
    Ok(links)
}

fn profile(name: &str) -> Result<Profile, Problem> {
    name.parse().or_else(|_| {
        let all = Profile::ALL.map(Profile::name).join(", ");
        problem(
            "profile",
            format!("there is no \"{name}\": valid are {all}"),
        )
    })
}

fn medium(name: &str) -> Result<Medium, Problem> {
    let medium: Result<Medium, BadLink> = name.parse();
    medium.or_else(|error| problem("medium", error.0))
}

/// The link behind a gateway.
pub(super) fn core_link(table: &CoreTable) -> Result<Link, Problem> {
    let link = match (table.rtt_ms, table.rate_mbit) {
        (None, None) => Profile::Wire.link(),
        (Some(rtt_ms), Some(rate_mbit)) => Link::new(rtt_ms, rate_mbit),
        _ => {
            return problem("core", "takes `rtt_ms` and `rate_mbit`, or neither: a wire");
        }
    };
    match link.check() {
        Ok(()) => Ok(link),
        Err(error) => problem("core", error.0),
    }
}

/// The changes of a link.
pub(super) fn timeline(table: &LinkTable, first: &Link) -> Result<Vec<Change>, Problem> {
    let mut link = first.clone();
    let mut last = 0.0;
    let mut changes = Vec::new();
    for change in &table.timeline {
        if !(change.at_s >= last && change.at_s <= LONGEST_S) {
            return problem(
                "at_s",
                "the entries of the timeline are not in order of time",
            );
        }
        last = change.at_s;
        if link.direct {
            return problem("profile", "`wire` has nothing that a timeline could change");
        }
        link.rtt_ms = change.rtt_ms.unwrap_or(link.rtt_ms);
        link.rate_mbit = change.rate_mbit.unwrap_or(link.rate_mbit);
        link.queue_packets = change.queue_packets.or(link.queue_packets);
        link.loss_pct = change.loss_pct.unwrap_or(link.loss_pct);
        link.reorder_pct = change.reorder_pct.unwrap_or(link.reorder_pct);
        if let Some(model) = &change.loss_model {
            link.loss_model = loss_model(model)?;
        }
        if let Err(error) = link.check() {
            return problem("at_s", error.0);
        }
        changes.push(Change {
            at_s: change.at_s,
            link: link.clone(),
        });
    }
    Ok(changes)
}
