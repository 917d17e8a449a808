//! The `vtl` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    vtl_cli::main()
}
