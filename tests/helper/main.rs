//! Processes that end-to-end tests start and kill.
//!
//! ```text
//! vtl-e2e-helper hooker                       a Hooker without a broker, as its standard input says
//! vtl-e2e-helper hold listen|connect AT COUNT an application with many sessions
//! ```

mod hold;
mod hooker;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["hooker"] => hooker::serve(),
        ["hold", role, at, count] => hold::run(role, at, count),
        _ => panic!("{args:?}: see the sources"),
    }
}
