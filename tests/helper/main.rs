//! Processes that end-to-end tests start and kill.
//!
//! ```text
//! vtl-e2e-helper hooker                       a Hooker without a broker, as its standard input says
//! vtl-e2e-helper hold listen|connect AT COUNT an application with many sessions
//! vtl-e2e-helper talk serve|connect AT COUNT [idle]
//!                                             an application with many TCP connections
//! ```

mod hold;
mod hooker;
mod talk;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["hooker"] => hooker::serve(),
        ["hold", role, at, count] => hold::run(role, at, count),
        ["talk", role, at, count] => talk::run(role, at, count, false),
        ["talk", role, at, count, "idle"] => talk::run(role, at, count, true),
        _ => panic!("{args:?}: see the sources"),
    }
}
