# Trains C5.0 through the R package's C code, as its C5.0() and predict() do: Rscript c50.R C50.so STEM TRIALS GLOBAL.
# Prints the trees as C5.0 stores them, and after them its errors on the training and in a cross-validation of which
# fold k has the cases k, k + 10, k + 20 …
arguments <- commandArgs(TRUE)
dyn.load(arguments[1])
whole <- function(lines) paste(c(lines, ""), collapse = "\n")
names <- readLines(paste0(arguments[2], ".names"))
data <- readLines(paste0(arguments[2], ".data"))
classes <- strsplit(sub("[.]$", "", names[1]), ", ")[[1]]
truth <- match(sub(".*,", "", data), classes)
stopifnot(!is.na(truth))
learn <- function(lines) {
  .C("C50", whole(names), whole(lines), "", FALSE, FALSE, 0L, as.integer(arguments[3]), FALSE, 0, 1L,
     as.integer(arguments[4] == "0"), 0.25, 2L, FALSE, TRUE, tree = character(1), rules = character(1),
     output = character(1))$tree
}
errors <- function(tree, rows) {
  cases <- whole(sub("[^,]*$", "?", data[rows]))
  n <- length(rows)
  z <- .C("predictions", cases, whole(names), tree, "", "", pred = integer(n), confidence = double(n * length(classes)),
          trials = 0L, output = character(1))
  sum(z$pred != truth[rows])
}
tree <- learn(data)
cat(grep("^id=", strsplit(tree, "\n")[[1]], value = TRUE, invert = TRUE), sep = "\n")
all <- seq_along(data)
folds <- lapply(0:9, function(k) all[(all - 1) %% 10 == k])
crossed <- sapply(folds, function(rows) errors(learn(data[-rows]), rows))
cat(sprintf("training: %d of %d wrong\ncross-validation: %d of %d wrong\n", errors(tree, all), length(all), sum(crossed),
            length(all)))
