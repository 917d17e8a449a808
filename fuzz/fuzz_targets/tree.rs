//! Decision trees from anybody. The first byte chooses what the rest is: a model's file, which is refused or can be asked
//! anything; or a data set, which is refused or can be trained with.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use vtl_tree::{CsvColumns, DataSet, Model, Options, Value, train};

fn ask(model: &Model, values: &[Value]) {
    assert!(model.classify(values) < model.classes().len());
    let distribution = model.distribution(values);
    assert!((distribution.iter().sum::<f64>() - 1.0).abs() < 1e-6);
    for condition in model.path(values) {
        model.words(&condition);
    }
    model.outside(values);
}

fn model(json: &[u8]) {
    let Ok(model) = Model::from_json(json) else {
        return;
    };
    let values = [0.0, f64::INFINITY, f64::NAN].map(Value::Continuous);
    for value in values.into_iter().chain([
        Value::Missing,
        Value::Discrete(0),
        Value::Discrete(u32::MAX),
    ]) {
        ask(&model, &vec![value; model.attributes().len()]);
    }
    ask(&model, &[]);
    assert!(!model.to_string().is_empty());
    assert_eq!(Model::from_json(model.to_json().as_bytes()), Ok(model));
}

fn data(data: vtl_tree::Result<DataSet>) {
    // Small ones: how long training takes is nobody's but the user's.
    let Ok(data) = data else { return };
    if data.cases().len() * data.attributes().len() > 1000 {
        return;
    }
    let options = Options {
        trials: 2,
        ..Options::default()
    };
    if let Ok(model) = train(&data, &options) {
        for case in data.cases() {
            ask(&model, &case.values);
        }
        assert_eq!(Model::from_json(model.to_json().as_bytes()), Ok(model));
    }
}

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some((kind, rest)) = input.split_first() else {
        return Corpus::Reject;
    };
    match (kind, std::str::from_utf8(rest)) {
        (b'm', _) => model(rest),
        (b'n', Ok(text)) => {
            let (names, cases) = text.split_once("\n\n").unwrap_or((text, ""));
            data(DataSet::from_names(names, cases));
        }
        (b'c', Ok(text)) => {
            let columns = CsvColumns {
                class: "c",
                group: Some("g"),
                weight: Some("w"),
                ignored: &[],
            };
            data(DataSet::from_csv(text, &columns));
            data(DataSet::from_csv(
                text,
                &CsvColumns {
                    class: "c",
                    ..CsvColumns::default()
                },
            ));
        }
        _ => return Corpus::Reject,
    }
    Corpus::Keep
});
