//! Rules of plans: by what a transfer goes, and by what instead while the path is so.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vtl_core::reconfigure::Condition;
use vtl_proto::carrier::GraftSpec;

use super::file::{Problem, problem, refuse_params};

/// A rule. Of an unmodified program it is one of `rules.toml`; an aware one follows it by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rule {
    /// By what it goes.
    pub(crate) own: GraftSpec,
    /// The condition on the path.
    pub(crate) condition: String,
    /// By what while that holds.
    pub(crate) then: GraftSpec,
}

impl Rule {
    /// The file of rules for the client's daemon: connections to this port, which may lose something. What decides stays
    /// for a second at least.
    pub(crate) fn file(&self, port: u16) -> String {
        let Self {
            own,
            condition,
            then,
        } = self;
        format!(
            "[[rule]]\nname = \"plan\"\nport = {port}\ncarrier = \"graft:{own}\"\nloss_tolerant = true\ndwell = \"1s\"\n\
             when = {{ if = \"{condition}\", carrier = \"graft:{then}\" }}\n"
        )
    }
}

/// A rule as it is written: as one of `rules.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RuleTable {
    carrier: String,
    when: WhenTable,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WhenTable {
    #[serde(rename = "if")]
    condition: String,
    carrier: String,
}

/// Checks rules.
pub(super) fn rules(
    tables: &BTreeMap<String, RuleTable>,
) -> Result<BTreeMap<String, Rule>, Problem> {
    let graft = |text: &str| -> Result<GraftSpec, Problem> {
        let spec = text.strip_prefix("graft:").map(str::parse::<GraftSpec>);
        let Some(Ok(spec)) = spec else {
            return problem(
                "carrier",
                format!("\"{text}\" is none of graft:NAME and graft:NAME?PARAMETER=VALUE"),
            );
        };
        refuse_params("carrier", &spec.name, |known| {
            let fits = |(name, value): (&String, &u32)| {
                let found = known.iter().find(|p| p.name == *name);
                found.is_some_and(|p| (p.min..=p.max).contains(value))
            };
            let mut wrong = spec.params.iter().filter(|param| !fits(*param));
            wrong.next().map(|(name, _)| name.clone())
        })?;
        Ok(spec)
    };
    let rule = |(name, table): (&String, &RuleTable)| {
        if let Err(why) = table.when.condition.parse::<Condition>() {
            return problem("if", why.to_string());
        }
        let rule = Rule {
            own: graft(&table.carrier)?,
            condition: table.when.condition.clone(),
            then: graft(&table.when.carrier)?,
        };
        Ok((name.clone(), rule))
    };
    tables.iter().map(rule).collect()
}
